"""A run's newest checkpoint, as a model to ask."""

from pathlib import Path

import torch

from mixtron.launch.checkpoint import find_checkpoint, load_weights
from mixtron.launch.config import RunConfig
from mixtron.launch.synthetic.accuracy import evaluate_settings
from mixtron.launch.synthetic.grid import Setting
from mixtron.megatron_ext.config import ParallelConfig
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel


def accuracy_of_run(
    config: RunConfig, run_dir: Path, settings: list[Setting], *, sequences: int, seed: int
) -> list[dict]:
    """A row for each setting, as `evaluate_settings` makes them. Raises as `load_model` does."""
    ranks, chunk = load_model(config, run_dir, max(setting.length for setting in settings))
    rows = evaluate_settings(chunk, config.model, ranks, settings, sequences=sequences, seed=seed)
    torch.distributed.destroy_process_group()
    return rows


def load_model(config: RunConfig, run_dir: Path, longest: int) -> tuple[Ranks, torch.nn.Module]:
    """The newest checkpoint's model, whole, on this rank.

    Raises:
        ConfigError: no checkpoint.
        CheckpointError: none that is usable.
    """
    device = init_distributed()
    ranks = init_model_parallel(seed=config.training.seed, device=device)
    path = find_checkpoint(run_dir / "checkpoints", "auto", ranks)
    if path is None:
        raise ConfigError(f"{run_dir}: no complete checkpoint under checkpoints/")
    chunks = build_model(
        config.model,
        config.mixers,
        ParallelConfig(),
        ranks,
        seed=config.training.seed,
        bf16=config.training.precision == "bf16",
        max_tokens=longest,
    )
    load_weights(path, chunks, ranks)
    return ranks, chunks[0]
