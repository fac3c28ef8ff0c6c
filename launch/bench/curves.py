"""`mixtron bench curves`: one config trained in several forms, on the same data in the same order.

Two forms of one computation round differently, so that their losses part slowly. How far is told
by a run whose mathematics is that of the first form and whose rounding is not (`noise`).
"""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mixtron.kernels.measure import table
from mixtron.launch.checks import check
from mixtron.launch.config import load_config
from mixtron.launch.lifetime import die_with_parent
from mixtron.launch.metrics_files import whole_rows
from mixtron.megatron_ext.errors import ConfigError

SMOOTHED_STEPS = 20
NOISE = "noise"


@dataclass(frozen=True)
class Form:
    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    name: str
    code: int
    """Of the process that trained it; what it had written by then is there."""
    rows: list[dict]

    def of(self, key: str) -> np.ndarray:
        return np.array([row[key] for row in self.rows])


def parse_forms(written: list[str], noise: str | None) -> list[Form]:
    """Forms as "NAME key=value ...", and the noise's: the first one's with these changes.

    Raises:
        ConfigError: fewer than two, or a name that comes twice.
    """
    forms = [Form(name, tuple(rest)) for name, *rest in (text.split() for text in written if text)]
    if forms and noise is not None:
        forms.insert(1, Form(NOISE, (*forms[0].overrides, *noise.split())))
    names = [form.name for form in forms]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"--form: {', '.join(names) or 'none'}; at least two with names of their own"
        )
    return forms


def bench_curves(
    config: Path,
    overrides: list[str],
    forms: list[Form],
    plot: Path,
    *,
    steps: int,
    limit_s: float,
    at_once: int,
) -> int:
    """Trains every form, prints how far each is from the first, writes `plot` and a JSON beside it.

    Returns:
        The number of forms whose process failed.
    Raises:
        ConfigError: a config that no form can have.
    """
    for form in forms:
        check(load_config(config, [*overrides, *form.overrides]), 1)
    plot.parent.mkdir(parents=True, exist_ok=True)

    def train(form: Form) -> Curve:
        rows = plot.with_suffix(f".{form.name}.jsonl")
        rows.unlink(missing_ok=True)
        arguments = [str(config), str(rows), str(steps), str(limit_s), *overrides, *form.overrides]
        command = [sys.executable, "-W", "ignore", "-m", "mixtron.launch.bench.curve", *arguments]
        # The thread that starts it lives until the last form has ended.
        end_with_this = partial(die_with_parent, signal.SIGTERM)
        code = subprocess.run(command, preexec_fn=end_with_this).returncode
        return Curve(form.name, code, list(whole_rows(rows)))

    with ThreadPoolExecutor(at_once) as pool:
        curves = list(pool.map(train, forms))
    told = [curve for curve in curves if curve.rows]
    if len(told) > 1:
        print(report(told))
        draw(told, plot)
    written = {c.name: {"exit_code": c.code, "rows": c.rows} for c in curves}
    plot.with_suffix(".json").write_text(json.dumps(written))
    failed = [curve.name for curve in curves if curve.code]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


def report(curves: list[Curve]) -> str:
    """Losses of each form, and their distance from the first one's, over the steps of both."""
    first, noise = curves[0], {c.name: c for c in curves}.get(NOISE)
    base = None if noise is None else np.abs(smoothed(difference(noise, first))).mean()
    rows = []
    for curve in curves:
        apart = difference(curve, first)
        mean = float(np.abs(smoothed(apart)).mean())
        rows.append(
            (
                curve.name,
                len(curve.rows),
                f"{curve.of('loss')[-SMOOTHED_STEPS:].mean():.4f}",
                float(np.abs(apart).max()),
                float(np.abs(apart).mean()),
                mean,
                "-" if not base else f"{mean / base:.2f}",
                float(np.median(curve.of("grad_norm"))),
                float(curve.of("grad_norm").max()),
                curve.rows[-1]["skipped_steps"],
                float(1000 * curve.rows[-1]["seconds"] / len(curve.rows)),
            )
        )
    heads = (
        *("form", "steps", f"loss, last {SMOOTHED_STEPS}", "largest difference"),
        *("mean difference", f"mean of {SMOOTHED_STEPS} smoothed", "of the noise's"),
        *("median gradient norm", "largest", "skipped", "ms a step"),
    )
    return table(heads, rows)


def difference(curve: Curve, first: Curve) -> np.ndarray:
    """Of the losses at the steps that both have."""
    common = min(len(curve.rows), len(first.rows))
    return curve.of("loss")[:common] - first.of("loss")[:common]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Running means over `SMOOTHED_STEPS` steps, fewer where there are fewer."""
    width = min(SMOOTHED_STEPS, len(values))
    return np.convolve(values, np.ones(width) / width, mode="valid")


def draw(curves: list[Curve], plot: Path) -> None:
    """Losses, smoothed differences from the first form, gradient norms."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    for curve in curves:
        axes[0].plot(curve.of("step"), curve.of("loss"), linewidth=0.8, label=curve.name)
        apart = smoothed(difference(curve, curves[0]))
        axes[1].plot(np.arange(len(apart)) + 1, apart, linewidth=0.8)
        axes[2].semilogy(curve.of("step"), curve.of("grad_norm"), linewidth=0.8)
    labels = ("loss", f"difference, means of {SMOOTHED_STEPS}", "gradient norm")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_ylabel(label)
    axes[0].legend()
    axes[2].set_xlabel("step")
    figure.savefig(plot, dpi=120)
