"""What is drawn, as data: lines, bands and marks, thinned so that any length of run fits a page."""

import math
from dataclasses import dataclass, field

import numpy as np

from mixtron.launch.report.runs import Column, RunRecord

POINTS = 1000
"""Of a line over steps; beyond that, each stands for a stretch: its mean, and its range as band."""
Number = float | None
"""None: a gap in the line."""


@dataclass
class Line:
    label: str
    color: int
    x: list[float]
    y: list[Number]
    run: int | None = None
    """Whose switch hides it."""
    tokens: list[float] | None = None
    """The other x axis of a line over steps."""
    low: list[Number] | None = None
    high: list[Number] | None = None
    points: bool = False
    """Few enough to be drawn as dots as well."""
    dashed: bool = False


@dataclass
class Mark:
    """A vertical line."""

    x: float
    tokens: float
    color: int
    run: int
    label: str


@dataclass
class Figure:
    name: str
    """Of its PNG."""
    section: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    log: bool = False
    marks: list[Mark] = field(default_factory=list)


def progress_figures(runs: list[RunRecord]) -> list[Figure]:
    """Loss, validation, learning rate, gradient norm, skipped steps, speed, memory."""
    validation = sorted({n for run in runs for n in run.columns if n.startswith("validation/")})
    shown = [
        ("loss", "Training", "Training loss", "nats a token", "train/loss", False),
        *(
            (
                f"validation_{name.removeprefix('validation/')}",
                "Training",
                f"Validation loss: {name.removeprefix('validation/')}",
                "nats a token",
                name,
                False,
            )
            for name in validation
        ),
        ("lr", "Training", "Learning rate", "", "train/lr", False),
        ("grad_norm", "Training", "Gradient norm before clipping", "", "train/grad_norm", True),
        ("skipped", "Training", "Skipped steps", "so far", "train/skipped_steps", False),
        ("throughput", "Machine", "Throughput", "tokens/s", "speed/tokens_per_s", False),
        ("flops", "Machine", "Model FLOPs a rank", "TFLOP/s", "speed/tflops_per_gpu", False),
        ("memory", "Machine", "Peak memory of rank 0", "GiB", "memory/peak_gib", False),
    ]
    figures = []
    for name, section, title, unit, column, log in shown:
        lines = [
            line_over_steps(run.columns[column], run, number, run.name, number)
            for number, run in enumerate(runs)
            if column in run.columns
        ]
        figures.append(Figure(name, section, title, "step", unit, lines, log, restart_marks(runs)))
    return figures


def restart_marks(runs: list[RunRecord]) -> list[Mark]:
    marks = []
    for number, run in enumerate(runs):
        for restart in run.restarts:
            step = restart.after_step
            label = f"{run.name}: went on after step {step}, had reached {restart.reached_step}"
            tokens = float(np.interp(step, *run.tokens_at))
            marks.append(Mark(step, tokens, number, number, label))
    return marks


def line_over_steps(column: Column, run: RunRecord, number: int, label: str, color: int) -> Line:
    """The column thinned; `number` is the run's."""
    step_N, value_N = np.asarray(column.steps), np.asarray(column.values)
    x, mean, low, high = thinned(step_N, value_N)
    line = Line(
        label,
        color,
        x.tolist(),
        _numbers(mean),
        number,
        tokens=np.interp(x, *run.tokens_at).tolist(),
        points=len(x) <= 60,
    )
    if len(step_N) > len(x):
        line.low, line.high = _numbers(low), _numbers(high)
    return line


def thinned(
    step_N: np.ndarray, value_N: np.ndarray, points: int = POINTS
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """At most `points` of: the mean step of a stretch, the value's mean, smallest and largest.

    Values that are not finite are left out; a stretch of nothing else is NaN.
    """
    value_N = np.where(np.isfinite(value_N), value_N, np.nan)
    if len(step_N) <= points:
        return step_N, value_N, value_N, value_N
    first, last = int(step_N.min()), int(step_N.max())
    stretch_N = (step_N - first) * points // (last - first + 1)
    order = np.argsort(stretch_N, kind="stable")
    step_N, value_N, stretch_N = step_N[order], value_N[order], stretch_N[order]
    start = np.flatnonzero(np.diff(stretch_N, prepend=-1))
    count = np.diff(np.append(start, len(step_N)))
    finite = np.add.reduceat(np.isfinite(value_N).astype(np.int64), start)
    total = np.add.reduceat(np.nan_to_num(value_N), start)
    mean = np.divide(total, finite, out=np.full(len(start), np.nan), where=finite > 0)
    step = np.add.reduceat(step_N, start) / count
    return step, mean, np.fmin.reduceat(value_N, start), np.fmax.reduceat(value_N, start)


def _numbers(values: np.ndarray) -> list[Number]:
    return [x if math.isfinite(x) else None for x in values.tolist()]
