"""What a synthetic task is, and how the files under `tasks/` are found."""

import importlib
import itertools
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BeforeValidator, Field

from mixtron.launch.synthetic.draws import Draws, key_of
from mixtron.megatron_ext.config import Positive, Section
from mixtron.megatron_ext.errors import ConfigError


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Fraction = Annotated[float, Field(ge=0, le=1)]
Mixed = Annotated[
    list[Positive],
    Field(min_length=1),
    BeforeValidator(_as_list, json_schema_input_type=Positive | list[Positive]),
]
"""One value, or several of which each sample takes one."""
MixedFraction = Annotated[
    list[Fraction],
    Field(min_length=1),
    BeforeValidator(_as_list, json_schema_input_type=Fraction | list[Fraction]),
]


@dataclass(frozen=True)
class Examples:
    """N sequences of T tokens."""

    inputs_NT: np.ndarray
    """int64."""
    labels_NT: np.ndarray
    """int64: what is to be answered at a position; 0 where nothing is."""
    mask_NT: np.ndarray
    """bool: where something is to be answered."""

    @classmethod
    def blank(cls, count: int, length: int) -> Self:
        """Zeros, to be filled."""
        shape = (count, length)
        return cls(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool))

    def ask(self, at: Any, answers: np.ndarray) -> None:
        """Sets labels and mask at an index of [N, T]."""
        self.labels_NT[at], self.mask_NT[at] = answers, True


class Task(Section):
    """A task's parameters. Subclasses add `task: Literal[<file name>]` and their own fields."""

    task: str

    load: ClassVar[str | None] = None
    """The field that makes the task harder at a given length; it is `Mixed`."""

    def vocabulary(self) -> int:
        """Token ids are below this."""
        raise NotImplementedError

    def chance(self) -> float:
        """Accuracy of answers drawn without a look at the sequence, from the right symbols."""
        raise NotImplementedError

    def misfit(self, length: int) -> str | None:
        """Why sequences of `length` tokens cannot be made, and what would work; None if they can.

        Only called on tasks whose mixed fields hold one value.
        """
        raise NotImplementedError

    def generate(self, draws: Draws, length: int) -> Examples:
        """Sequences for the samples of `draws`. Only called as `misfit` is, where it is None."""
        raise NotImplementedError

    def evaluation_grid(self, length: int) -> dict[str, list]:
        """What accuracy is reported by when nobody says: up to 8 times the length, fewer loads."""
        grid: dict[str, list] = {"length": [length * factor for factor in (1, 2, 4, 8)]}
        if self.load is not None:
            largest = max(getattr(self, self.load))
            grid[self.load] = sorted({-(-largest // 4), -(-largest // 2), largest})
        return grid

    def plain(self) -> list[Self]:
        """The tasks, each with one value a field, that this one mixes."""
        lists = {k: v for k, v in self.__dict__.items() if isinstance(v, list)}
        return [
            self.model_copy(update={k: [v] for k, v in zip(lists, values, strict=True)})
            for values in itertools.product(*lists.values())
        ]

    def check(self, length: int, key: str) -> None:
        """Raises ConfigError, naming `key`, when sequences of `length` tokens cannot be made."""
        for task in self.plain():
            problem = task.misfit(length)
            if problem:
                raise ConfigError(f"{key}: {self.task} at length {length}: {problem}")

    def examples(self, seed: int, split: str, indices_N: np.ndarray, length: int) -> Examples:
        """Samples of one split by number: a pure function of all arguments and the parameters.

        Args:
            split: "train" or another word; each has samples of its own.
            indices_N: int64.
        """
        tasks, key = self.plain(), key_of(self.task, split, seed)
        if len(tasks) == 1:
            return tasks[0].generate(Draws(key, indices_N), length)
        made = Examples.blank(len(indices_N), length)
        which_N = Draws(key_of("mixture", key), indices_N).integers(0, len(tasks))
        for number, task in enumerate(tasks):
            rows = np.flatnonzero(which_N == number)
            part = task.generate(Draws(key, indices_N[rows]), length)
            made.inputs_NT[rows] = part.inputs_NT
            made.labels_NT[rows] = part.labels_NT
            made.mask_NT[rows] = part.mask_NT
        return made


@cache
def tasks() -> dict[str, type[Task]]:
    """Every task's class by name, in alphabetical order; a file under `tasks/` is a task."""
    from mixtron.launch.synthetic import tasks as folder

    names = sorted(m.name for m in pkgutil.iter_modules(folder.__path__))
    return {name: importlib.import_module(f"{folder.__name__}.{name}").Task for name in names}
