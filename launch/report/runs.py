"""What a run folder tells of a run, without torch."""

import json
from array import array
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.metrics_files import METRICS, STARTS, whole_rows
from mixtron.megatron_ext.errors import ConfigError


@dataclass
class Column:
    """One number over the steps at which it was logged."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True)
class Restart:
    after_step: int
    reached_step: int
    """The last step that was logged before; what was computed since `after_step` was lost."""


@dataclass
class RunRecord:
    """One run."""

    name: str
    folder: Path
    config: RunConfig
    columns: dict[str, Column]
    restarts: list[Restart]
    exit_code: int | None
    """None: it runs, or was killed."""

    @cached_property
    def tokens_at(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and the tokens trained on until them."""
        column = self.columns["train/tokens"]
        return np.asarray(column.steps), np.asarray(column.values)

    def last(self, name: str) -> float | None:
        return self.columns[name].values[-1] if name in self.columns else None

    @property
    def steps(self) -> int:
        return self.columns["train/loss"].steps[-1]


def read_runs(folders: list[Path]) -> list[RunRecord]:
    """Runs under names that tell them apart.

    Raises:
        ConfigError: not a run folder, no step logged in it, or the same folder twice.
    """
    runs: list[RunRecord] = []
    for folder in folders:
        if any(folder.resolve() == run.folder.resolve() for run in runs):
            raise ConfigError(f"{folder}: is given twice")
        run = read_run(folder)
        if any(run.name == other.name for other in runs):
            run.name = f"{run.name} ({folder})"
        runs.append(run)
    return runs


def read_run(folder: Path) -> RunRecord:
    """Raises ConfigError: not a run folder, or no step logged in it."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: not a run folder: there is no config.yaml")
    config = load_config(folder / "config.yaml")
    columns: dict[str, Column] = {}
    for row in whole_rows(folder / METRICS):
        step = row.pop("step")
        for name, value in row.items():
            columns.setdefault(name, Column()).add(step, value)
    if "train/loss" not in columns:
        raise ConfigError(f"{folder}: no step was logged in {METRICS}")
    starts = list(whole_rows(folder / STARTS))
    restarts = [Restart(s["after_step"], s["reached_step"]) for s in starts if s["reached_step"]]
    exit_file = folder / "exit.json"
    code = json.loads(exit_file.read_text())["exit_code"] if exit_file.exists() else None
    return RunRecord(config.name, folder, config, columns, restarts, code)
