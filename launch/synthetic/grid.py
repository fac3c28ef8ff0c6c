"""The settings that accuracy is reported for: a task at all combinations of some values."""

import itertools
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mixtron.launch.synthetic.task import Task
from mixtron.megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One cell of a grid: a task with its parameters, at a length."""

    task: Task
    length: int
    parameters: dict[str, Any]
    """What the grid varies, the length among it."""

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.parameters.items())


def settings_of(task: Task, length: int, grid: dict[str, list], key: str) -> list[Setting]:
    """The product of a grid's values, checked.

    Args:
        length: where the grid does not give it.
        key: what messages name.
    Raises:
        ConfigError: a parameter that the task does not have, or a value that it cannot take.
    """
    known = ["length", *(name for name in type(task).model_fields if name != "task")]
    for name in grid:
        if name not in known:
            raise ConfigError(
                f"{key}: {task.task} has no parameter {name!r}; it takes: {', '.join(known)}"
            )
    settings = []
    for values in itertools.product(*grid.values()):
        parameters = {"length": length, **dict(zip(grid, values, strict=True))}
        changed = {k: v for k, v in parameters.items() if k != "length"}
        try:
            varied = type(task).model_validate(task.model_dump() | changed)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join([key, *(str(part) for part in fault["loc"])])
            raise ConfigError(
                f"{where}: {fault['msg'].lower()}, found {fault['input']!r}"
            ) from None
        size = parameters["length"]
        if type(size) is not int or size < 1:
            raise ConfigError(f"{key}.length: input should be an integer above 0, found {size!r}")
        varied.check(size, key)
        settings.append(Setting(varied, size, parameters))
    return settings
