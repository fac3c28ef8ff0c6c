"""Spectra of a whole model: measured with a progress bar, told as table, JSON, CSV and a plot."""

import csv
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mixtron.launch.spectral.heads import HeadSpectrum, head_spectra
from mixtron.launch.spectral.weights import Model

NUMBERS = [
    "routing_share",
    "routing_rank",
    "filtering_rank",
    "routing_count",
    "filtering_count",
    "largest_real",
]


@dataclass(frozen=True)
class Spectra:
    """What was found of one model."""

    model: str
    family: str
    heads: dict[int, list[HeadSpectrum]]
    """By layer, from 0."""
    notes: list[str]

    def layer_mean(self, layer: int, number: str) -> float:
        return mean(getattr(head, number) for head in self.heads[layer])


def measure(model: Model, console: Console) -> Spectra:
    """Reads and measures one layer at a time."""
    heads, notes = {}, {}
    for layer, what in model.skipped.items():
        notes[f"layer {layer} ({what}) has no queries and keys of attention"] = None
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"spectra of {model.name}", total=model.layers)
        progress.advance(task, len(model.skipped))
        for weights in model:
            heads[weights.layer] = head_spectra(weights.q_HKD, weights.k_HKD, sd=weights.sd)
            notes |= dict.fromkeys(weights.notes)
            progress.advance(task)
    return Spectra(model.name, model.family, heads, list(notes))


def print_table(spectra: Spectra, console: Console) -> None:
    """A row a layer, means over its heads; the last column counts."""
    table = Table(title=f"{spectra.model} ({spectra.family})")
    titles = ["routing share", "routing rank", "filtering rank", "largest real eigenvalue"]
    for title in ["layer", *titles, "unstable heads"]:
        table.add_column(title, justify="right")
    for layer, heads in spectra.heads.items():
        unstable = sum(head.largest_real > 0 for head in heads)
        table.add_row(
            str(layer),
            f"{spectra.layer_mean(layer, 'routing_share'):.3f}",
            f"{spectra.layer_mean(layer, 'routing_rank'):.2f}",
            f"{spectra.layer_mean(layer, 'filtering_rank'):.2f}",
            f"{max(head.largest_real for head in heads):.4g}",
            f"{unstable}/{len(heads)}",
        )
    console.print(table)
    for note in spectra.notes:
        console.print(f"note: {note}")


def write(spectra: Spectra, folder: Path) -> list[Path]:
    """spectral.json (everything), spectral.csv (a row a head) and cascade.png."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("spectral.json", "spectral.csv", "cascade.png")]
    paths[0].write_text(json.dumps(_as_json(spectra)) + "\n")
    with paths[1].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["layer", "head", *NUMBERS])
        for layer, heads in spectra.heads.items():
            for i, head in enumerate(heads):
                writer.writerow([layer, i, *(getattr(head, number) for number in NUMBERS)])
    _plot(spectra, paths[2])
    return paths


def _as_json(spectra: Spectra) -> dict:
    def of_head(head: HeadSpectrum) -> dict:
        pairs = [[x.real, x.imag] for x in head.eigenvalues]
        return asdict(head) | {"eigenvalues": pairs}

    layers = [
        {"layer": layer, "heads": [of_head(head) for head in heads]}
        for layer, heads in spectra.heads.items()
    ]
    names = {"model": spectra.model, "family": spectra.family, "notes": spectra.notes}
    return names | {"layers": layers}


def _plot(spectra: Spectra, path: Path) -> None:
    """The cascade: effective ranks over depth, every head and the layers' means."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (ranks, shares) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    layers = list(spectra.heads)
    for axes, number, color in (
        (ranks, "routing_rank", "tab:blue"),
        (ranks, "filtering_rank", "tab:orange"),
        (shares, "routing_share", "tab:blue"),
    ):
        points = [(i, getattr(h, number)) for i, heads in spectra.heads.items() for h in heads]
        axes.plot(*zip(*points, strict=True), ".", color=color, alpha=0.3, markersize=4)
        means = [spectra.layer_mean(layer, number) for layer in layers]
        axes.plot(layers, means, "o-", color=color, label=number.replace("_", " "))
        axes.legend()
    ranks.set(ylabel="effective rank (2 = one plane)", yscale="log", title=spectra.model)
    shares.set(xlabel="layer", ylabel="share of the energy", ylim=(0, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
