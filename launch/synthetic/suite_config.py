"""A suite's YAML file: which models are compared on which tasks."""

import copy
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from mixtron.launch.checks import check
from mixtron.launch.config import RunConfig, load_mapping, parse
from mixtron.launch.config_sections import AnyTask, SyntheticDataConfig
from mixtron.launch.synthetic.data import open_synthetic
from mixtron.launch.synthetic.grid import settings_of
from mixtron.megatron_ext.config import Count, Positive, Section
from mixtron.megatron_ext.errors import ConfigError


class SuiteTask(Section):
    synthetic: AnyTask
    sequence_length: Positive
    evaluate: dict[str, Annotated[list, Field(min_length=1)]] = {}
    """Values by parameter, `length` among them: accuracy is reported for all combinations."""
    run: dict[str, Any] = {}
    """What this task changes in the suite's `run`."""


class SuiteSize(Section):
    model: dict[str, Any]
    """The run's `model`, without vocabulary and pattern."""
    mixers: dict[str, dict[str, Any]] = {}
    """Options that this size changes, by the mixer's name."""


class SuiteConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    seeds: Annotated[list[Count], Field(min_length=1)]
    """Each seed draws other weights and other training samples."""
    sequences: Positive = 1000
    """That each combination is evaluated on, the same for all models."""
    run: dict[str, Any]
    """A run's `optimizer`, `schedule`, `training` and so on."""
    tasks: Annotated[dict[str, SuiteTask], Field(min_length=1)]
    sizes: Annotated[dict[str, SuiteSize], Field(min_length=1)]
    mixers: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    models: dict[str, list[str]] = {}
    """Layer patterns by name; by default each mixer is a model of its own."""
    tiny: dict[str, Any] = {}
    """What `--tiny` changes: merged key by key, null removes a key."""


class Cell:
    """One training run of a suite, with what it is evaluated on."""

    def __init__(self, suite: SuiteConfig, folder: Path, names: tuple[str, str, str], seed: int):
        self.task, self.size, self.model = names
        self.seed = seed
        self.label = f"{self.task}, {self.size}, {self.model}, seed {seed}"
        task = suite.tasks[self.task]
        grid = task.evaluate or task.synthetic.evaluation_grid(task.sequence_length)
        key = f"tasks.{self.task}.evaluate"
        self.settings = settings_of(task.synthetic, task.sequence_length, grid, key)
        vocabulary = max(t.vocabulary() for t in (task.synthetic, *(s.task for s in self.settings)))
        self.config = _run_config(suite, folder, names, seed, vocabulary)

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)


def load_suite(path: Path, *, tiny: bool) -> SuiteConfig:
    """Reads a suite's file.

    Raises:
        ConfigError: one line a fault, naming the file and the key.
    """
    raw = load_mapping(path)
    if tiny:
        if not raw.get("tiny"):
            raise ConfigError(f"{path}: has no `tiny` section")
        raw = merged(raw, raw["tiny"])
    return parse(SuiteConfig, raw)


def cells_of(suite: SuiteConfig, folder: Path) -> list[Cell]:
    """Every run, seed after seed, all checked as `mixtron validate` does.

    Raises:
        ConfigError: names the run that cannot be.
    """
    models = suite.models or {name: [name] for name in suite.mixers}
    cells = []
    for seed in suite.seeds:
        for task in suite.tasks:
            for size in suite.sizes:
                for model in models:
                    try:
                        cell = Cell(suite, folder, (task, size, model), seed)
                        check(cell.config, 1)
                        assert isinstance(cell.config.data, SyntheticDataConfig)
                        open_synthetic(cell.config.data, cell.config.model.vocab_size)
                    except ConfigError as error:
                        where = f"suite {suite.name}, {task}, {size}, {model}"
                        raise ConfigError(f"{where}: {error}") from None
                    cells.append(cell)
    return cells


def _run_config(
    suite: SuiteConfig, folder: Path, names: tuple[str, str, str], seed: int, vocab_size: int
) -> RunConfig:
    task_name, size_name, model_name = names
    task, size = suite.tasks[task_name], suite.sizes[size_name]
    pattern = suite.models.get(model_name, [model_name])
    unknown = [name for name in (*pattern, *size.mixers) if name not in suite.mixers]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not defined under mixers")
    run = merged(suite.run, task.run)
    return parse(
        RunConfig,
        run
        | {
            "name": f"{suite.name}-{task_name}-{size_name}-{model_name}-{seed}",
            "run_dir": str(folder / "runs" / task_name / size_name / model_name / f"seed_{seed}"),
            "model": size.model | {"vocab_size": vocab_size, "pattern": pattern},
            "mixers": {
                name: merged(suite.mixers[name], size.mixers.get(name, {})) for name in pattern
            },
            "data": {
                "sequence_length": task.sequence_length,
                "synthetic": task.synthetic.model_dump(mode="json"),
                "seed": seed,
            },
            "training": run.get("training", {}) | {"seed": seed},
        },
    )


def merged(base: dict, changes: dict) -> dict:
    """`base` with `changes` put in key by key at every depth; null removes a key."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result
