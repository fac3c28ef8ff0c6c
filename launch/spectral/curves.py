"""Perplexity against the number of linear layers, and how results of surgery are told."""

import csv
import json
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mixtron.launch.data import AnyValidation
from mixtron.launch.spectral.mappings import linearised
from mixtron.launch.spectral.variant import Variant, open_validation, perplexity
from mixtron.megatron_ext.parallel import Ranks


def linearisation_curve(variant: Variant, ranks: Ranks, console: Console) -> list[dict[str, float]]:
    """Perplexity with the first n layers linear, for n from 0 to all."""
    validation: dict[str, AnyValidation] = open_validation(variant)
    layers = variant.config.model.layers
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"linearising {variant.config.name}", total=layers + 1)
        for n in range(layers + 1):
            value = perplexity(variant.with_layers(linearised, range(n)), ranks, validation)
            change = 100 * (value / rows[0]["perplexity"] - 1) if rows else 0.0
            rows.append({"linear_layers": n, "perplexity": value, "change_percent": change})
            progress.advance(task)
    return rows


def tell(rows: dict[str, list[dict]], columns: list[str], console: Console) -> None:
    """A table a model."""
    for model, own in rows.items():
        table = Table(title=model)
        for column in columns:
            table.add_column(column.replace("_", " "), justify="right")
        for row in own:
            table.add_row(*(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row.values()))
        console.print(table)


def write(rows: dict[str, list[dict]], folder: Path, stem: str) -> list[Path]:
    """<stem>.json and <stem>.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.json", folder / f"{stem}.csv"]
    paths[0].write_text(json.dumps(rows, indent=1) + "\n")
    with paths[1].open("w", newline="") as file:
        flat = [{"model": model} | row for model, own in rows.items() for row in own]
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    return paths


def plot_linearisation(rows: dict[str, list[dict]], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for model, own in rows.items():
        points = [(row["linear_layers"], row["change_percent"]) for row in own]
        axes.plot(*zip(*points, strict=True), "o-", label=model)
    axes.axhline(5, color="grey", linestyle=":", label="5 %")
    axes.set(xlabel="first layers made linear", ylabel="change of perplexity (%)")
    axes.set_yscale("symlog", linthresh=10)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
