"""What mixers report of themselves (`Scalars` in megatron_ext), and the spectra of their weights.

A number's name is `<quantity>/layer_<n>` or `<quantity>/layer_<n>/level_<l>`.
"""

import re
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from mixtron.launch.report.figures import Figure, Line, line_over_steps
from mixtron.launch.report.runs import Column, RunRecord

if TYPE_CHECKING:
    from mixtron.launch.spectral.report import Spectra

NAME = re.compile(r"(?P<quantity>[^/]+)/layer_(?P<layer>\d+)(?:/level_(?P<level>\d+))?")
TITLES = {
    "kla_step_size": "KLA: step size eta",
    "kla_decay": "KLA: decay alpha",
    "path_beta": "PaTH: beta",
    "forget_gate": "FoX: forget gate f",
    "sa_gate": "Stochastic attention: gate of the random window",
    "swa_gate": "Stochastic attention: gate of the sliding window",
    "sd_damping": "S-D attention: damping d",
    "lambda_all": "Log-linear attention: lambda",
    "lambda_scored": "Log-linear attention: lambda of scored tokens",
    "lambda_unscored": "Log-linear attention: lambda of other tokens",
}
SECTION = "Mixers"
Key = tuple[int, int | None]
"""Layer, and level if there are any."""


def mixer_figures(runs: list[RunRecord]) -> list[Figure]:
    """Each quantity over steps, and by layer or level as it was last."""
    found = [quantities(run) for run in runs]
    figures = []
    for quantity in dict.fromkeys(name for own in found for name in own):
        title = TITLES.get(quantity, quantity)
        having = [
            (i, run, found[i][quantity]) for i, run in enumerate(runs) if quantity in found[i]
        ]
        if any(level is None for _, _, columns in having for _, level in columns):
            lines = [
                line_over_steps(mean_of(list(columns.values())), run, i, run.name, i)
                for i, run, columns in having
            ]
            name = f"{quantity}_over_steps"
            figures.append(Figure(name, SECTION, f"{title}, mean of layers", "step", "", lines))
            lines = [_by_layer(i, run.name, columns) for i, run, columns in having]
            name = f"{quantity}_by_layer"
            figures.append(Figure(name, SECTION, f"{title}, newest", "layer", "", lines))
            continue
        lines = [_by_level(i, run.name, columns) for i, run, columns in having]
        what = f"{title} by level, newest; band: layers"
        figures.append(Figure(f"{quantity}_by_level", SECTION, what, "level", "", lines))
        for i, run, columns in having:
            lines = [
                line_over_steps(mean_of(own), run, i, f"level {level}", level)
                for level, own in by_level(columns).items()
            ]
            what = f"{title} by level, mean of layers: {run.name}"
            figures.append(Figure(f"{quantity}_over_steps_{i}", SECTION, what, "step", "", lines))
    return figures


def quantities(run: RunRecord) -> dict[str, dict[Key, Column]]:
    found: dict[str, dict[Key, Column]] = {}
    for name, column in run.columns.items():
        if match := NAME.fullmatch(name):
            level = None if match["level"] is None else int(match["level"])
            found.setdefault(match["quantity"], {})[int(match["layer"]), level] = column
    return found


def by_level(columns: dict[Key, Column]) -> dict[int, list[Column]]:
    """Of all layers."""
    levels: dict[int, list[Column]] = {}
    for (_, level), column in sorted(columns.items()):
        assert level is not None
        levels.setdefault(level, []).append(column)
    return dict(sorted(levels.items()))


def mean_of(columns: list[Column]) -> Column:
    """Step by step, over those that were logged at it."""
    step_N = np.concatenate([np.asarray(column.steps) for column in columns])
    value_N = np.concatenate([np.asarray(column.values) for column in columns])
    step, place_N = np.unique(step_N, return_inverse=True)
    mean = np.bincount(place_N, value_N) / np.bincount(place_N)
    return Column(array("q", step.tolist()), array("d", mean.tolist()))


def _by_layer(number: int, label: str, columns: dict[Key, Column]) -> Line:
    newest = sorted((layer, column.values[-1]) for (layer, _), column in columns.items())
    x, y = zip(*newest, strict=True)
    return Line(label, number, list(x), list(y), number, points=True)


def _by_level(number: int, label: str, columns: dict[Key, Column]) -> Line:
    newest = {
        level: [column.values[-1] for column in own] for level, own in by_level(columns).items()
    }
    return Line(
        label,
        number,
        list(newest),
        [float(np.mean(values)) for values in newest.values()],
        number,
        low=[min(values) for values in newest.values()],
        high=[max(values) for values in newest.values()],
        points=True,
    )


def cascade_figures(runs: list[RunRecord], console: Console) -> list[Figure]:
    """Routing and filtering over depth, of the newest checkpoints of runs with such heads."""
    from mixtron.launch.spectral.report import measure

    ranks = Figure(
        *(
            "cascade_rank",
            "Spectra",
            "Effective rank by layer: routing (solid), filtering (dashed)",
        ),
        *("layer", "2 = one plane", []),
    )
    shares = Figure("cascade_share", "Spectra", "Share of routing in the energy", "layer", "", [])
    for number, run in enumerate(runs):
        model = _model_of(run)
        if model is None:
            continue
        spectra = measure(model, console)
        ranks.lines += [
            _over_depth(spectra, "routing_rank", f"{run.name}: routing", number),
            _over_depth(spectra, "filtering_rank", f"{run.name}: filtering", number, dashed=True),
        ]
        shares.lines.append(_over_depth(spectra, "routing_share", run.name, number))
    return [ranks, shares] if shares.lines else []


def _over_depth(
    spectra: "Spectra", what: str, label: str, number: int, *, dashed: bool = False
) -> Line:
    """The mean over each layer's heads."""
    layers = list(spectra.heads)
    y = [spectra.layer_mean(layer, what) for layer in layers]
    x = [layer + 1.0 for layer in layers]
    return Line(label, number, x, list(y), number, points=True, dashed=dashed)


def _model_of(run: RunRecord):
    """Its newest checkpoint's heads; None without a checkpoint, or without attention's heads."""
    from mixtron.launch.checkpoint_files import list_checkpoints
    from mixtron.launch.spectral.runs import open_run

    folder: Path = run.folder / "checkpoints"
    types = {run.config.mixers[name].type for name in run.config.model.layer_mixers}
    with_heads = types & {"softmax_attention", "sd_attention"}
    if not with_heads or not any(info.complete for info in list_checkpoints(folder)):
        return None
    return open_run(run.folder)
