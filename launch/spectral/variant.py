"""A run's model as config and weights, changed layer by layer, evaluated, and written as a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mixtron.launch.checkpoint_files import list_checkpoints
from mixtron.launch.config import RunConfig, dump_config
from mixtron.launch.data import AnyValidation, open_data
from mixtron.launch.evaluate import evaluate
from mixtron.launch.loop import Progress, Run
from mixtron.launch.saver import Saver
from mixtron.launch.spectral.mappings import Layer
from mixtron.launch.spectral.runs import StoredTensors, config_of, newest_checkpoint
from mixtron.launch.spectral.weights import SpectralError
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.mixers.base import MixerConfig
from mixtron.megatron_ext.model import build_model, global_parameters
from mixtron.megatron_ext.optimizer import build_optimizer, wrap_model
from mixtron.megatron_ext.parallel import Ranks


@dataclass(frozen=True)
class Variant:
    """A model on one process."""

    config: RunConfig
    weights: dict[str, Tensor]
    """By their names in a checkpoint; what is missing is drawn anew."""

    @classmethod
    def read(cls, path: Path) -> "Variant":
        """The model of a run's newest checkpoint, or of a checkpoint."""
        checkpoint = newest_checkpoint(path)
        tensors = StoredTensors(checkpoint)
        return cls(config_of(checkpoint), {name: tensors[name] for name in tensors.of_model()})

    @property
    def mixers(self) -> list[MixerConfig]:
        """Of every layer."""
        return [self.config.mixers[name] for name in self.config.model.layer_mixers]

    def layer(self, number: int) -> Layer:
        prefix = _prefix(number)
        own = {n.removeprefix(prefix): x for n, x in self.weights.items() if n.startswith(prefix)}
        gain_D = self.weights.get(f"decoder.layers.{number}.input_layernorm.weight")
        return Layer(self.mixers[number], own, gain_D)

    def with_layers(self, change: Callable[[Layer], Layer], numbers) -> "Variant":
        """Layers of these numbers replaced by what `change` makes of them."""
        config, weights = self.config, dict(self.weights)
        mixers, pattern = dict(config.mixers), list(config.model.layer_mixers)
        for number in numbers:
            new, prefix = change(self.layer(number)), _prefix(number)
            weights = {n: x for n, x in weights.items() if not n.startswith(prefix)}
            weights |= {prefix + name: x for name, x in new.tensors.items()}
            pattern[number] = _name_of(new.mixer, pattern[number], mixers)
        used = {name: mixer for name, mixer in mixers.items() if name in pattern}
        model = config.model.model_copy(update={"pattern": pattern})
        return Variant(config.model_copy(update={"model": model, "mixers": used}), weights)


def _prefix(number: int) -> str:
    return f"decoder.layers.{number}.self_attention."


def _name_of(mixer: MixerConfig, old: str, mixers: dict) -> str:
    """Its name under `mixers:`; a new one joins the others."""
    for name, other in mixers.items():
        if other == mixer:
            return name
    width = getattr(mixer, "head_dim", None) or getattr(mixer, "key_dim", "")
    stem = name = f"{old}_{width}" if mixer.type == mixers[old].type else mixer.type
    number = 2
    while name in mixers:
        name, number = f"{stem}_{number}", number + 1
    mixers[name] = mixer
    return name


def build(variant: Variant, ranks: Ranks):
    """The model on this one rank, its weights filled in.

    Raises:
        SpectralError: a weight of another shape, or that the model does not have.
    """
    config = variant.config
    (chunk,) = build_model(
        config.model,
        config.mixers,
        ParallelConfig(),
        ranks,
        seed=config.training.seed,
        bf16=config.training.precision == "bf16",
        max_tokens=config.training.micro_batch_sequences * config.data.sequence_length,
    )
    left = dict(variant.weights)
    for name, parameter in global_parameters(chunk):
        _fill(name, parameter, left)
    if left:
        raise SpectralError(f"the model has no {', '.join(sorted(left))}")
    return chunk


@torch.no_grad()
def _fill(name: str, parameter, left: dict[str, Tensor]) -> None:
    """Takes its weight, or those of its components, out of `left`."""
    if name in left:
        stored = left.pop(name)
    else:
        parts = [f"{name}.{part}" for part in parameter.declaration.components]
        if not parts or any(part not in left for part in parts):
            return
        stored = torch.cat([left.pop(part) for part in parts])
    if stored.shape != parameter.shape:
        raise SpectralError(f"{name} is {list(stored.shape)}, the model's {list(parameter.shape)}")
    parameter.copy_(stored)


def perplexity(variant: Variant, ranks: Ranks, validation: dict[str, AnyValidation]) -> float:
    """exp of the mean loss a token, over the first validation set."""
    chunk = build(variant, ranks)
    losses = evaluate([chunk], variant.config, ranks, validation)
    assert losses is not None
    return float(torch.tensor(next(iter(losses.values()))).exp())


def open_validation(variant: Variant) -> dict[str, AnyValidation]:
    """Raises SpectralError where the run names no validation set."""
    _, _, found = open_data(variant.config)
    if not found:
        raise SpectralError(f"{variant.config.name}: no data.validation to take a perplexity on")
    return dict([next(iter(found.items()))])


def write_run(variant: Variant, run_dir: Path, ranks: Ranks) -> None:
    """A run folder that `mixtron train RUN_DIR/config.yaml` goes on from, at step 0.

    Raises:
        SpectralError: the folder already holds checkpoints.
    """
    if list_checkpoints(run_dir / "checkpoints"):
        raise SpectralError(f"{run_dir} already holds checkpoints; give another folder")
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    config = variant.config.model_copy(update={"run_dir": str(run_dir)})
    wrapped = wrap_model([build(variant, ranks)], ParallelConfig(), ranks)
    optimizer = build_optimizer(
        wrapped, config.optimizer, ranks, bf16=config.training.precision == "bf16"
    )
    _, data, validation = open_data(config)
    saver = Saver(run_dir / "checkpoints", config.checkpoint, ranks, print)
    run = Run(config, ranks, wrapped, optimizer, data, validation, Progress(), saver, print)
    dump_config(config, run_dir / "config.yaml")
    saver.save(0, wrapped, optimizer, run.state(), config, remove_others=False)
    saver.finish()
