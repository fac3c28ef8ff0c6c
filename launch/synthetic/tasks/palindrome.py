"""Palindrome: saying a random sequence backwards (as in the papers on KDA and KLA)."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mixtron.launch.synthetic import task
from mixtron.launch.synthetic.draws import Draws
from mixtron.launch.synthetic.task import Examples


class Task(task.Task):
    """Half the length of uniform symbols, a separator, and the symbols backwards.

        a b c d | d c b
                d c b a     to be answered

    The separator is 0, symbols are 1 to `symbols`. The last symbol is answered, never read.
    """

    task: Literal["palindrome"] = "palindrome"  # pyright: ignore[reportIncompatibleVariableOverride]
    symbols: Annotated[int, Field(ge=2)] = 64

    def vocabulary(self) -> int:
        return self.symbols + 1

    def chance(self) -> float:
        return 1 / self.symbols

    def misfit(self, length: int) -> str | None:
        if length % 2:
            return f"the length must be even; nearest: {length - 1}, {length + 1}"
        return None

    def generate(self, draws: Draws, length: int) -> Examples:
        half = length // 2
        made = Examples.blank(len(draws), length)
        told = draws.integers(1, self.symbols + 1, half)
        made.inputs_NT[:, :half] = told
        made.inputs_NT[:, half + 1 :] = told[:, :0:-1]
        made.ask(np.s_[:, half:], told[:, ::-1])
        return made
