"""A suite's table: mean and spread over seeds, as JSON, CSV, Markdown and a plot."""

import csv
import json
import statistics
from importlib.metadata import version
from pathlib import Path

from mixtron.launch.synthetic.suite_config import SuiteConfig
from mixtron.launch.whole_files import replaced

COLUMNS = (
    "task",
    "size",
    "model",
    "setting",
    "seeds",
    "accuracy_mean",
    "accuracy_std",
    "accuracy_min",
    "accuracy_max",
    "sequence_accuracy_mean",
    "chance",
)


def write_table(suite: SuiteConfig, results: list[dict], folder: Path) -> list[Path]:
    """Writes table.json, .csv, .md and .png; each is replaced whole."""
    rows = summarise(results)
    report = {
        "suite": suite.name,
        "versions": {name: version(name) for name in ("mixtron", "torch")},
        "sequences": suite.sequences,
        "rows": rows,
        "results": results,
    }
    paths = [folder / f"table.{suffix}" for suffix in ("json", "csv", "md", "png")]
    writers = (
        lambda path: path.write_text(json.dumps(report, indent=1) + "\n"),
        lambda path: _write_csv(path, rows),
        lambda path: path.write_text(markdown(suite.name, rows)),
        lambda path: _plot(path, rows),
    )
    for path, write in zip(paths, writers, strict=True):
        with replaced(path) as file:
            write(file)
    return paths


def summarise(results: list[dict]) -> list[dict]:
    """A row for each task, size, model and setting, in the order of the results."""
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        for row in result["rows"]:
            label = ", ".join(f"{key}={value}" for key, value in row["setting"].items())
            key = (result["task"], result["size"], result["model"], label)
            groups.setdefault(key, []).append(row)
    rows = []
    for key, group in sorted(groups.items(), key=lambda item: item[0][0]):
        accuracies = [row["accuracy"] for row in group]
        whole = [row["sequence_accuracy"] for row in group]
        values = (
            *key,
            len(group),
            statistics.mean(accuracies),
            statistics.stdev(accuracies) if len(group) > 1 else None,
            min(accuracies),
            max(accuracies),
            statistics.mean(whole),
            group[0]["chance"],
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def _write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def markdown(name: str, rows: list[dict]) -> str:
    """A table a task: models down, settings across; accuracy in per cent, with its spread."""
    parts = [f"# {name}\n\nAccuracy in %, mean ± standard deviation over seeds.\n"]
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        settings = list(dict.fromkeys(row["setting"] for row in mine))
        parts.append(f"\n## {task} (chance {100 * mine[0]['chance']:.1f})\n\n")
        parts.append(f"| size | model | {' | '.join(settings)} |\n")
        parts.append(f"|---|---|{'---|' * len(settings)}\n")
        for size, model in dict.fromkeys((row["size"], row["model"]) for row in mine):
            cells = {
                row["setting"]: _cell(row)
                for row in mine
                if (row["size"], row["model"]) == (size, model)
            }
            shown = " | ".join(cells.get(setting, "-") for setting in settings)
            parts.append(f"| {size} | {model} | {shown} |\n")
    return "".join(parts)


def _cell(row: dict) -> str:
    spread = "" if row["accuracy_std"] is None else f" ± {100 * row['accuracy_std']:.1f}"
    return f"{100 * row['accuracy_mean']:.1f}{spread}"


def _plot(path: Path, rows: list[dict]) -> None:
    """A panel a task and size: accuracy by setting, a line a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["task"], row["size"]) for row in rows))
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 3.2 * len(panels)), layout="constrained", squeeze=False
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        mine = [row for row in rows if (row["task"], row["size"]) == panel]
        settings = list(dict.fromkeys(row["setting"] for row in mine))
        for model in dict.fromkeys(row["model"] for row in mine):
            line = [row for row in mine if row["model"] == model]
            axis.errorbar(
                [settings.index(row["setting"]) for row in line],
                [100 * row["accuracy_mean"] for row in line],
                [100 * (row["accuracy_std"] or 0) for row in line],
                marker="o",
                capsize=3,
                label=model,
            )
        axis.axhline(100 * mine[0]["chance"], color="grey", linestyle=":", label="chance")
        axis.set(title=" ".join(panel), ylabel="accuracy (%)", ylim=(-3, 103))
        axis.set_xticks(range(len(settings)), [s.replace(", ", "\n") for s in settings], fontsize=7)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)
