"""Queries and keys of this project's checkpoints, of any parallel layout, on one process."""

import json
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from mixtron.launch.checkpoint_files import list_checkpoints, read_manifest
from mixtron.launch.config import RunConfig
from mixtron.launch.spectral.weights import (
    LayerWeights,
    Model,
    SpectralError,
    repeat_to,
    to_heads,
)
from mixtron.megatron_ext.mixers.sd_attention.config import Config as SDAttention
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxAttention
from mixtron.megatron_ext.optimizer_state import PREFIX


class StoredTensors:
    """Tensors of a checkpoint by name, put together from whatever ranks wrote them."""

    def __init__(self, checkpoint: Path):
        self.reader = FileSystemReader(checkpoint)
        self.entries = self.reader.read_metadata().state_dict_metadata

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self.entries else None

    def of_model(self) -> list[str]:
        """Names of the model's own tensors: without the optimizer's moments of each."""
        return [
            name
            for name, entry in self.entries.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(PREFIX)
        ]

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        assert isinstance(entry, TensorStorageMetadata)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            # That there is no process group, which is meant.
            warnings.simplefilter("ignore", UserWarning)
            load({name: tensor}, storage_reader=self.reader, no_dist=True)
        return tensor


def is_run(path: Path) -> bool:
    """A run folder or one of its checkpoints."""
    return (path / "manifest.json").exists() or (path / "checkpoints").is_dir()


def newest_checkpoint(path: Path) -> Path:
    """A run's newest complete checkpoint, or the checkpoint itself.

    Raises:
        SpectralError: the run has none.
    """
    if (path / "manifest.json").exists():
        return path
    complete = [info.path for info in list_checkpoints(path / "checkpoints") if info.complete]
    if not complete:
        raise SpectralError(f"{path}: no complete checkpoint under checkpoints/")
    return complete[-1]


def config_of(checkpoint: Path) -> RunConfig:
    """The configuration that the checkpoint carries.

    Raises:
        SpectralError: there is none.
    """
    config = read_manifest(checkpoint)["config"]
    if not config:
        raise SpectralError(f"{checkpoint}: its manifest.json carries no config")
    # From JSON text, where lists stand for what strict validation wants.
    return RunConfig.model_validate_json(json.dumps(config))


def open_run(path: Path) -> Model:
    """Softmax and S-D attention layers; layers of other mixers are named as skipped."""
    checkpoint = newest_checkpoint(path)
    config, tensors = config_of(checkpoint), StoredTensors(checkpoint)
    mixers = [config.mixers[name] for name in config.model.layer_mixers]
    skipped = {
        i: mixer.type
        for i, mixer in enumerate(mixers)
        if not isinstance(mixer, SDAttention | SoftmaxAttention)
    }
    if len(skipped) == len(mixers):
        found = ", ".join(sorted(set(skipped.values())))
        raise SpectralError(f"{path}: no layer has queries and keys of attention; found {found}")

    def read(layer: int) -> LayerWeights:
        return _read(tensors, mixers[layer], layer)

    return Model(config.name, "mixtron", len(mixers), skipped, read=read)


def _read(tensors: StoredTensors, mixer, layer: int) -> LayerWeights:
    block = f"decoder.layers.{layer}."
    norm = f"{block}input_layernorm.weight"
    gain_D = tensors.get(norm)
    weight = f"{block}self_attention.in_proj.weight."
    q_ED, k_ED = tensors[f"{weight}query"], tensors[f"{weight}key"]
    notes = ("rotary positions: measured at distance 0",) if mixer.rope_base else ()
    q_HKD = to_heads(q_ED, mixer.heads, gain_D)
    if isinstance(mixer, SDAttention):
        notes += ("M is the routing S alone; the damping D is a diagonal beside it",)
        return LayerWeights(layer, q_HKD, to_heads(k_ED, mixer.heads, gain_D), sd=True, notes=notes)
    k_GKD = to_heads(k_ED, mixer.kv_heads, gain_D)
    if mixer.qk_norm:
        attention = f"{block}self_attention."
        q_HKD = q_HKD * tensors[f"{attention}q_norm_weight"].double()[:, None]
        k_GKD = k_GKD * tensors[f"{attention}k_norm_weight"].double()[:, None]
        notes += ("q and k are normalised for each token: the norms' gains are folded in",)
    return LayerWeights(layer, q_HKD, repeat_to(k_GKD, mixer.heads), notes=notes)
