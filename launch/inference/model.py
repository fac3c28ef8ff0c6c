"""A source's model on this rank."""

from dataclasses import dataclass

import torch

from mixtron.launch.checkpoint import check_checkpoint, load_weights
from mixtron.launch.inference.source import Source
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
    config = source.config
    seed = config.training.seed
    device = init_distributed()
    ranks = init_model_parallel(config.parallel.tensor, seed=seed, device=device)
    check_checkpoint(source.checkpoint, ranks)
    (chunk,) = build_model(
        config.model,
        config.mixers,
        config.parallel,
        ranks,
        seed=seed,
        bf16=config.training.precision == "bf16",
        max_tokens=config.data.sequence_length,
    )
    load_weights(source.checkpoint, [chunk], ranks)
    return Loaded(source, ranks, chunk.eval())
