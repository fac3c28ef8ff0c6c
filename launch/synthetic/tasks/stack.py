"""Many stacks at once: what a pop takes off (as in the papers on KDA and KLA)."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from mixtron.launch.synthetic import task
from mixtron.launch.synthetic.draws import Draws
from mixtron.launch.synthetic.task import Examples, Mixed

BLANK, PUSH, POP = 0, 1, 2
FIRST_ELEMENT = 3


class Task(task.Task):
    """Operations of three tokens on `stacks` independent last-in-first-out stacks.

        push 0 a   push 1 b   push 0 c   pop 1 b   pop 0 c
                                             b         c       to be answered

    An operation is a pop with probability 1/2, of a stack drawn from those that hold something,
    and a push where none does. Ids: blank 0, push 1, pop 2, the elements, the stacks. A length
    that 3 does not divide ends in blanks.
    """

    task: Literal["stack"] = "stack"  # pyright: ignore[reportIncompatibleVariableOverride]
    stacks: Mixed = [64]
    elements: Annotated[int, Field(ge=2)] = 64

    load: ClassVar[str | None] = "stacks"

    def vocabulary(self) -> int:
        return FIRST_ELEMENT + self.elements + max(self.stacks)

    def chance(self) -> float:
        return 1 / self.elements

    def misfit(self, length: int) -> str | None:
        return "at least 6 tokens: a push and a pop" if length < 6 else None

    def generate(self, draws: Draws, length: int) -> Examples:
        stacks, operations = self.stacks[0], length // 3
        made = Examples.blank(len(draws), length)
        rows_N = np.arange(len(draws))
        wants_pop_NO = draws.integers(0, 2, operations).astype(bool)
        pushed_to_NO = draws.integers(0, stacks, operations)
        elements_NO = FIRST_ELEMENT + draws.integers(0, self.elements, operations)
        # Linked lists: the operation that pushed each stack's top, and what lay under it.
        top_NS = np.full((len(draws), stacks), -1)
        under_NO = np.full((len(draws), operations), -1)
        for i in range(operations):
            holds_NS = top_NS >= 0
            count_N = holds_NS.sum(1)
            pops_N = wants_pop_NO[:, i] & (count_N > 0)
            rank_N = draws.below(np.maximum(count_N, 1))
            popped_from_N = (np.cumsum(holds_NS, axis=1) > rank_N[:, None]).argmax(1)
            stack_N = np.where(pops_N, popped_from_N, pushed_to_NO[:, i])
            before_N = top_NS[rows_N, stack_N]
            element_N = np.where(pops_N, elements_NO[rows_N, before_N], elements_NO[:, i])
            under_NO[:, i] = before_N
            top_NS[rows_N, stack_N] = np.where(pops_N, under_NO[rows_N, before_N], i)
            made.inputs_NT[:, 3 * i] = np.where(pops_N, POP, PUSH)
            made.inputs_NT[:, 3 * i + 1] = FIRST_ELEMENT + self.elements + stack_N
            made.inputs_NT[:, 3 * i + 2] = element_N
            made.ask((rows_N[pops_N], 3 * i + 1), element_N[pops_N])
        return made
