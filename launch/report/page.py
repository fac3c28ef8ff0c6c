"""The page: one file that a browser opens without a server, and its figures as PNGs."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from statistics import median

from jinja2 import Environment, PackageLoader, StrictUndefined

from mixtron.launch.report.figures import Figure, Line
from mixtron.launch.report.runs import RunRecord

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b"]
"""Okabe and Ito's, told apart by colour-blind people too. Later runs begin again."""


def write_page(path: Path, title: str, runs: list[RunRecord], figures: list[Figure]) -> None:
    template = Environment(
        loader=PackageLoader("mixtron.launch.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")
    content = {
        "colors": COLORS,
        "runs": [run.name for run in runs],
        "figures": [asdict(figure) for figure in figures],
    }
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))
    path.write_text(
        template.render(
            title=title,
            rows=summary(runs),
            sections=list(dict.fromkeys(figure.section for figure in figures)),
            # Inside a script element nothing may look like its end.
            data=data.replace("<", "\\u003c"),
        ),
        encoding="utf-8",
    )


def summary(runs: list[RunRecord]) -> list[dict[str, str]]:
    """A row a run, its cells by their titles."""
    rows = []
    for number, run in enumerate(runs):
        validation = [n for n in run.columns if n.startswith("validation/")]
        speed = run.columns.get("speed/tokens_per_s")
        memory = run.columns.get("memory/peak_gib")
        rows.append(
            {
                "color": COLORS[number % len(COLORS)],
                "run": run.name,
                "layers": ", ".join(_counted(run.config.model.layer_mixers)),
                "step": f"{run.steps:,} of {run.config.training.steps:,}",
                "tokens": f"{run.last('train/tokens') or 0:,.0f}",
                "loss": _shown(run.last("train/loss")),
                "validation": ", ".join(
                    f"{n.removeprefix('validation/')} {_shown(run.last(n))}" for n in validation
                ),
                "tokens/s": f"{median(speed.values):,.0f}" if speed else "",
                "GiB": f"{max(memory.values):.2f}" if memory else "",
                "restarts": str(len(run.restarts)),
                "exit code": "none yet" if run.exit_code is None else str(run.exit_code),
            }
        )
    return rows


def _counted(mixers: list[str]) -> list[str]:
    return [f"{mixers.count(name)} {name}" for name in dict.fromkeys(mixers)]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def write_pngs(folder: Path, figures: list[Figure]) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = []
    for drawn in figures:
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for line in drawn.lines:
            _draw(axes, line)
        for mark in drawn.marks:
            axes.axvline(mark.x, color=_color(mark.color), linestyle=":", linewidth=1)
        axes.set(xlabel=drawn.x_label, ylabel=drawn.y_label, title=drawn.title)
        if drawn.log and any(y for line in drawn.lines for y in line.y):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        paths.append(folder / f"{drawn.name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _draw(axes, line: Line) -> None:
    color = _color(line.color)
    style = {"linestyle": "--" if line.dashed else "-", "marker": "o" if line.points else None}
    axes.plot(line.x, _gaps(line.y), color=color, label=line.label, markersize=3, **style)
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, _gaps(line.low), _gaps(line.high), color=color, alpha=0.2, lw=0)


def _gaps(values: list) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]
