"""`mixtron bench overhead`: what reading data, logging and saving add to a config's step.

Data and logging are switched off in turn and saving on, each beside steps that read and log and do
not save, in rounds: what drifts during the run is in all of them. Before each, files are on disk,
so that nothing is written beside steps that did not ask for it.
"""

import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from mixtron.kernels.measure import table
from mixtron.launch.bench.step import begin, build_run, wait, with_micro_batches
from mixtron.launch.checks import check
from mixtron.launch.config import RunConfig
from mixtron.launch.data import open_data
from mixtron.launch.loop import Run, speed, train_step
from mixtron.launch.metrics import Metrics, step_line
from mixtron.launch.saver import Saver

PARTS = {"data": -1, "logging": -1, "saving": 1}
"""What is switched, and whether off or on."""
NEVER = 10**9


class ReadBefore:
    """The same samples again and again, from memory."""

    def __init__(self, data: Any, count: int) -> None:
        self.samples = [data.read(entry) for entry in data.next(count)]

    def next(self, count: int) -> list[int]:
        return self.upcoming(count)

    def upcoming(self, count: int) -> list[int]:
        return list(range(count))

    def read(self, number: int) -> Any:
        return self.samples[number]

    def realised_shares(self) -> dict[str, float]:
        return {}


def bench_overhead(config: RunConfig, steps: int, rounds: int, micro_batches: int) -> None:
    """Prints a table on rank 0.

    Args:
        steps: that are timed at a time. A checkpoint should be written within them: what its
            writing costs later ones is not counted.
        rounds: with and without each part, whose medians are told, after one that is not counted.
        micro_batches: of a step that is timed, a data-parallel rank.
    Raises:
        ConfigError, DataError: as training does.
    """
    _, data, _ = open_data(config)
    ranks = begin(config)
    own_step = config.training.global_batch_tokens
    folder = Path(tempfile.mkdtemp(prefix="mixtron_overhead_"))
    config = config.model_copy(update={"run_dir": str(folder)})
    config = with_micro_batches(config, ranks.data_size, micro_batches)
    check(config, ranks.world_size)
    run = build_run(config, ranks, data)
    run.saver = Saver(folder / "checkpoints", config.checkpoint, ranks, run.say)
    run.saver.root.mkdir()
    run.saver.reserve(run.wrapped, run.optimizer)
    metrics = Metrics(
        folder, first_step=1, total_steps=steps, tensorboard=config.logging.tensorboard
    )
    quiet = config.logging.model_copy(update={"every_steps": NEVER})
    forms = {
        "data": dataclasses.replace(run, data=ReadBefore(data, config.global_batch_sequences)),
        "logging": dataclasses.replace(
            run, config=config.model_copy(update={"logging": quiet}), prepared=None
        ),
    }

    def seconds(part: str) -> float:
        seen = None if part == "logging" else metrics
        return timed(forms.get(part, run), seen, steps, saving=part == "saving")

    costs, base_s = {part: [] for part in PARTS}, []
    for counted in [False] + [True] * rounds:
        for part, sign in PARTS.items():
            base, other = seconds("none"), seconds(part)
            if counted:
                base_s.append(base)
                costs[part].append(sign * (other - base))
    metrics.close()
    run.saver.close()
    shutil.rmtree(folder)
    if ranks.is_first:
        cost_s = {part: statistics.median(cost) for part, cost in costs.items()}
        step_s = (statistics.median(base_s) - cost_s["data"] - cost_s["logging"]) / steps
        print(report(config, cost_s, steps, step_s, own_step))
        print(f"\n{spread(costs, steps * step_s)}")


def timed(run: Run, metrics: Metrics | None, steps: int, *, saving: bool) -> float:
    """Seconds of so many steps, at the first of which a checkpoint's writing begins if `saving`."""
    train_step(run)  # Reads the data of the first one that is timed.
    run.saver.close()
    os.sync()
    wait(run.ranks)
    started = time.perf_counter()
    if saving:
        run.saver.save(run.progress.step, run.wrapped, run.optimizer, run.state(), run.config)
    for _ in range(steps):
        begun = time.perf_counter()
        values = train_step(run)
        if metrics is not None:
            values |= speed(run.config, run.ranks, time.perf_counter() - begun)
            metrics.log(run.progress.step, values)
            run.say(step_line(run.progress.step, steps, values))
    wait(run.ranks)
    return time.perf_counter() - started


def report(config: RunConfig, cost_s: dict[str, float], steps: int, step_s: float, own: int) -> str:
    """What each part costs, and its share of the time that a run of the config takes.

    Args:
        cost_s: of each part, in `steps` steps and one save.
        step_s: of a timed step.
        own: tokens of the config's own step, which may be longer than a timed one.
    """
    longer = own / config.training.global_batch_tokens
    own_s, every = step_s * longer, config.logging.every_steps
    shares = {
        "data": cost_s["data"] / steps * longer / own_s,
        "logging": cost_s["logging"] / steps / every / own_s,
        "saving": cost_s["saving"] / config.checkpoint.save_every_steps / own_s,
    }
    units = {
        "data": ("a timed step", steps),
        "logging": ("a logged step", steps),
        "saving": ("a checkpoint", 1),
    }
    rows = [
        (part, f"{1000 * cost_s[part] / count:,.1f}", unit, f"{shares[part]:.2%}")
        for part, (unit, count) in units.items()
    ]
    rows.append(("together", "", "", f"{sum(shares.values()):.2%}"))
    said = (
        f"A timed step takes {1000 * step_s:,.1f} ms; the config's own, of {own:,} tokens, "
        f"{own_s:,.2f} s, logged every {every} and saved every "
        f"{config.checkpoint.save_every_steps} steps\n"
    )
    return f"{said}\n{table(('part', 'ms', 'of', 'share of the run'), rows)}"


def spread(costs: dict[str, list[float]], steps_s: float) -> str:
    """How far the rounds lie apart, as shares of the time of their steps."""
    ranges = (
        f"{part} {min(cost) / steps_s:.2%} to {max(cost) / steps_s:.2%}"
        for part, cost in costs.items()
    )
    return f"Of the timed steps, the rounds' least and most: {', '.join(ranges)}"
