"""What ranks train under each engine, and what is compared of it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

from mixtron.launch import loop
from mixtron.launch.config import load_config
from mixtron.launch.data import open_data
from mixtron.launch.setup_run import prepare
from mixtron.megatron_ext.deepspeed_engine import ZeroOptimizer
from tests.helpers.jobs import small_config, write_config
from tests.helpers.ranks import run_on_ranks
from tests.launch.short_runs import Outcome, trained

MEGATRON = ["engine=megatron"]


def zero(stage: int, offload: str = "none") -> list[str]:
    options = [f"zero_stage: {stage}", f"offload: {offload}", "pin_memory: false"]
    if stage == 3:
        # Else models as small as these stay whole on every rank.
        options.append("zero_optimization: {stage3_param_persistence_threshold: 0}")
    return ["engine=deepspeed", f"deepspeed={{{', '.join(options)}}}"]


def curves(config_path: str, variants: list[list[str]], steps: int) -> list[list[tuple]]:
    """Losses and gradient norms of each variant's steps, one after the other in one world."""
    return [_curve(config_path, overrides, steps) for overrides in variants]


def _curve(config_path: str, overrides: list[str], steps: int) -> list[tuple]:
    same_numbers_on_all_ranks()
    config = load_config(config_path, overrides)
    run = prepare(config, *open_data(config)[1:])
    rows = [loop.train_step(run) for _ in range(steps)]
    return [(row["train/loss"], row["train/grad_norm"]) for row in rows]


def trained_with(
    corpus: Path, folder: Path, world: int, runs: list[tuple[list[str], int | None]]
) -> tuple[list[int], str]:
    """Runs of one run folder, each with overrides and the step that a signal comes in; the exit
    codes and the last run's error."""
    folder.mkdir(exist_ok=True)
    config = write_config(folder / "config.yaml", small_config(corpus, folder / "run"))
    outcomes = run_on_ranks(world, _in_turn, str(config), runs)[0]
    return [outcome.code for outcome in outcomes], outcomes[-1].error


def _in_turn(config_path: str, runs: list) -> list[Outcome]:
    outcomes = []
    for overrides, stop_at in runs:
        same_numbers_on_all_ranks()
        outcomes.append(trained(config_path, overrides, stop_at))
    return outcomes


@dataclass
class BadSteps:
    """What five steps did, of which the second and the fourth are bad."""

    unchanged: list[bool] = field(default_factory=list)
    skipped: int = 0
    last_loss: float = math.nan


def with_bad_steps(config_path: str, overrides: list[str]) -> BadSteps:
    """In step 2 a gradient of the last rank is infinite, in step 4 the loss alone is."""
    same_numbers_on_all_ranks()
    config = load_config(config_path, overrides)
    run = prepare(config, *open_data(config)[1:])
    plain, optimizer = loop.run_micro_batches, cast(ZeroOptimizer, run.optimizer)

    def infinite(gradient: torch.Tensor) -> torch.Tensor:
        bad = run.progress.step + 1 == 2 and run.ranks.world_rank == run.ranks.world_size - 1
        return gradient + math.inf if bad else gradient

    def passes(*args, **kwargs):
        totals = plain(*args, **kwargs)
        if run.progress.step + 1 == 4:
            totals[0] = math.inf
        return totals

    next(run.wrapped[0].parameters()).register_hook(infinite)
    loop.run_micro_batches = passes
    result = BadSteps()
    try:
        for _ in range(5):
            before = torch.cat([master.detach().clone() for master in optimizer.masters()])
            values = loop.train_step(run)
            after = torch.cat([master.detach() for master in optimizer.masters()])
            assert after.isfinite().all()
            result.unchanged.append(torch.equal(before, after))
    finally:
        loop.run_micro_batches = plain
    result.skipped, result.last_loss = run.progress.skipped_steps, values["train/loss"]
    return result


def same_numbers_on_all_ranks() -> None:
    """Stage 3 counts modules since the process began and wants ranks to agree; a process here
    may have run alone before."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    (counter,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__  # type: ignore
    counter[0] = 0
    Init.param_id = 0
