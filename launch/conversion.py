"""A run's softmax-attention layers as PaTH layers, in a run that trains on."""

from pathlib import Path

import torch

from mixtron.launch.checkpoint_files import CheckpointError
from mixtron.launch.spectral.mappings import Layer
from mixtron.launch.spectral.variant import Variant, write_run
from mixtron.megatron_ext.mixers.path.config import Config as PathConfig
from mixtron.megatron_ext.mixers.path.convert import KEPT, softmax_to_path
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxConfig
from mixtron.megatron_ext.parallel import Ranks


def softmax_run_to_path(source: Path, run_dir: Path, ranks: Ranks, *, forget_gate: bool) -> int:
    """Writes a run folder with config and a checkpoint of step 0; the number of layers converted.

    Layers of other mixers stay. What PaTH adds is drawn from the run's seed; the optimizer starts
    afresh.

    Args:
        source: a run, of which the newest checkpoint is taken, or a checkpoint, of any layout.
        forget_gate: PaTH-FoX, its gate open.
    Raises:
        CheckpointError: the model has no softmax attention.
        ConfigError: it has windows, which PaTH has not.
        SpectralError: no checkpoint there, or `run_dir` holds some already.
    """
    variant = Variant.read(source)
    found = [i for i, mixer in enumerate(variant.mixers) if isinstance(mixer, SoftmaxConfig)]
    if not found:
        types = ", ".join(sorted({mixer.type for mixer in variant.mixers}))
        raise CheckpointError(
            f"{source}: --to path converts softmax_attention; its layers are {types}"
        )
    generator = torch.Generator().manual_seed(variant.config.training.seed)

    def convert(layer: Layer) -> Layer:
        softmax = layer.mixer
        assert isinstance(softmax, SoftmaxConfig)
        kept = {field: getattr(softmax, field) for field in KEPT}
        path = PathConfig(**kept, forget_gate=forget_gate)
        weights = softmax_to_path(
            layer.tensors,
            softmax,
            path,
            init_std=variant.config.model.init_std,
            generator=generator,
        )
        return Layer(path, weights)

    write_run(variant.with_layers(convert, found), run_dir, ranks)
    return len(found)
