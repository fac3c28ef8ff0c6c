"""Multi-query repeated associative recall, N back (PaTH, arXiv 2505.16381, section 4.1)."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from mixtron.launch.synthetic import task
from mixtron.launch.synthetic.draws import Draws
from mixtron.launch.synthetic.task import Examples, Mixed
from mixtron.megatron_ext.config import Positive


class Task(task.Task):
    """Variables are assigned again and again; at each one, the value it was given N times ago.

        A 1  B 2  A 5  B 6  A 7  A 9
                  1    2    5    7       to be answered with N = 1
                            1    5       with N = 2

    Variable and value of each assignment are uniform. Ids: the values, then the variables.
    """

    task: Literal["mqrar"] = "mqrar"  # pyright: ignore[reportIncompatibleVariableOverride]
    n_back: Positive = 1
    variables: Mixed = [32]
    values: Annotated[int, Field(ge=2)] = 64

    load: ClassVar[str | None] = "variables"

    def vocabulary(self) -> int:
        return self.values + max(self.variables)

    def chance(self) -> float:
        return 1 / self.values

    def misfit(self, length: int) -> str | None:
        if length % 2:
            return f"the length must be even; nearest: {length - 1}, {length + 1}"
        # One assignment more than can be made without any variable's (N + 1)-th.
        needed = 2 * (self.variables[0] * self.n_back + 1)
        if length < needed:
            return f"at least {needed} tokens, or nothing may be asked; lower variables or n_back"
        return None

    def generate(self, draws: Draws, length: int) -> Examples:
        n_back, assignments = self.n_back, length // 2
        made = Examples.blank(len(draws), length)
        variables = self.values + draws.integers(0, self.variables[0], assignments)
        values = draws.integers(0, self.values, assignments)
        made.inputs_NT[:, 0::2], made.inputs_NT[:, 1::2] = variables, values
        # Assignments sorted by variable, in order of time: N places back is N times ago.
        order = variables.argsort(1, kind="stable")
        by_variable = np.take_along_axis(variables, order, 1)
        same = by_variable[:, n_back:] == by_variable[:, :-n_back]
        rows, places = np.nonzero(same)
        answers = values[rows, order[rows, places]]
        made.ask((rows, 2 * order[rows, places + n_back]), answers)
        return made
