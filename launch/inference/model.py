"""A source's model on this rank."""

from dataclasses import dataclass
from pathlib import Path

import torch

from mixtron.launch.checkpoint import check_checkpoint, load_weights
from mixtron.launch.config import RunConfig
from mixtron.launch.inference.source import Source
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel


@dataclass(frozen=True)
class Loaded:
    source: Source
    ranks: Ranks
    chunk: torch.nn.Module


def load(source: Source) -> Loaded:
    """Every rank holds its share of a model that `source.config.parallel.tensor` ranks hold whole.

    Raises:
        CheckpointError: a damaged file, or weights that do not fit the model.
    """
    ranks, chunk = _load(source.checkpoint, source.config)
    return Loaded(source, ranks, chunk)


def load_on_one_rank(checkpoint: Path, config: RunConfig) -> torch.nn.Module:
    """The whole model, for what needs no tokenizer. Raises as `load` does."""
    return _load(checkpoint, config.model_copy(update={"parallel": ParallelConfig()}))[1]


def _load(checkpoint: Path, config: RunConfig) -> tuple[Ranks, torch.nn.Module]:
    seed = config.training.seed
    device = init_distributed()
    ranks = init_model_parallel(config.parallel.tensor, seed=seed, device=device)
    check_checkpoint(checkpoint, ranks)
    (chunk,) = build_model(
        config.model,
        config.mixers,
        config.parallel,
        ranks,
        seed=seed,
        bf16=config.training.precision == "bf16",
        max_tokens=config.data.sequence_length,
    )
    load_weights(checkpoint, [chunk], ranks)
    return ranks, chunk.eval()
