"""`mixtron eval synthetic TASK RUN_DIR`: accuracy of a run's newest checkpoint."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.config_sections import SyntheticDataConfig
from mixtron.launch.synthetic.grid import settings_of
from mixtron.launch.synthetic.task import Task
from mixtron.megatron_ext.errors import ConfigError


def evaluate_run(
    task_class: type[Task], run_dir: Path, assignments: list[str], sequences: int, seed: int
) -> None:
    """Prints a table of accuracy and writes it to `run_dir`/synthetic_TASK.json.

    Args:
        assignments: `parameter=value` or `parameter=v1,v2`; together they span a grid. Parameters
            that are not named are those that the run was trained with.
    Raises:
        ConfigError: an unknown parameter, or ids that the model does not have.
        CheckpointError: no usable checkpoint.
    """
    config = load_config(run_dir / "config.yaml")
    task, length = trained_task(config, task_class), config.data.sequence_length
    named = grid_of(assignments)
    defaults = task.evaluation_grid(length)
    grid = defaults | named
    if "length" in named and task.load is not None and task.load not in named:
        grid[task.load] = getattr(task, task.load)
    settings = settings_of(task, length, grid, task.task)
    for setting in settings:
        if setting.task.vocabulary() > config.model.vocab_size:
            raise ConfigError(
                f"{task.task} with {setting.label} has {setting.task.vocabulary()} ids, but the "
                f"model of {run_dir} has {config.model.vocab_size}"
            )
    # Seconds, which a mistake in the arguments must not cost.
    from mixtron.launch.synthetic.trained_model import accuracy_of_run

    rows = accuracy_of_run(config, run_dir, settings, sequences=sequences, seed=seed)
    report = {"task": task.model_dump(mode="json"), "run": config.name, "rows": rows}
    output = run_dir / f"synthetic_{task.task}.json"
    output.write_text(json.dumps(report, indent=1) + "\n")
    show(f"{config.name}: {task.task}", rows)
    Console(soft_wrap=True).print(f"written to {output}", markup=False)


def trained_task(config: RunConfig, task_class: type[Task]) -> Task:
    """The task as the run was trained on it, or with its defaults if it was not."""
    trained = config.data.synthetic if isinstance(config.data, SyntheticDataConfig) else None
    return trained if isinstance(trained, task_class) else task_class.model_validate({})


def grid_of(assignments: list[str]) -> dict[str, list]:
    """Lists of values by parameter; values are YAML."""
    grid = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not (name and separator and text):
            raise ConfigError(f"{assignment!r}: expected parameter=value or parameter=v1,v2")
        try:
            grid[name] = YAML(typ="safe", pure=True).load(f"[{text}]")
        except YAMLError:
            raise ConfigError(f"{assignment!r}: the values are not valid YAML") from None
    return grid


def show(title: str, rows: list[dict]) -> None:
    """Prints rows as a table."""
    table = Table(title=title)
    names = list(rows[0]["setting"])
    for name in (*names, "accuracy", "whole sequences", "chance", "sequences"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(str(row["setting"][name]) for name in names),
            f"{row['accuracy']:.2%}",
            f"{row['sequence_accuracy']:.2%}",
            f"{row['chance']:.2%}",
            f"{row['sequences']:,}",
        )
    Console().print(table)
