"""Word problems of finite groups: state tracking (Merrill et al., arXiv 2404.08819, section 5)."""

from functools import cache
from itertools import permutations
from typing import Literal

import numpy as np

from mixtron.launch.synthetic import task
from mixtron.launch.synthetic.draws import Draws
from mixtron.launch.synthetic.task import Examples

GroupName = Literal["a5", "s5", "a4xz5", "z60"]


class Task(task.Task):
    """Uniform elements g1 g2 g3 ... of a group; at each the product so far, g1 g2 ... gt.

    `a5` (60 elements) is complete for NC1, and so is `s5`; `a4xz5` is solvable and `z60` abelian,
    both of 60 elements too. Element 0 is the identity; permutations are in lexicographic order, and
    (g h)(x) = h(g(x)).
    """

    task: Literal["word_problem"] = "word_problem"  # pyright: ignore[reportIncompatibleVariableOverride]
    group: GroupName = "a5"

    def vocabulary(self) -> int:
        return len(multiplication_table(self.group))

    def chance(self) -> float:
        return 1 / self.vocabulary()

    def misfit(self, length: int) -> str | None:
        return None

    def generate(self, draws: Draws, length: int) -> Examples:
        table = multiplication_table(self.group)
        made = Examples.blank(len(draws), length)
        made.inputs_NT[:] = draws.integers(0, len(table), length)
        product_N = np.zeros(len(draws), dtype=np.int64)
        for t in range(length):
            product_N = table[product_N, made.inputs_NT[:, t]]
            made.ask(np.s_[:, t], product_N)
        return made


@cache
def multiplication_table(group: GroupName) -> np.ndarray:
    """int64 [order, order]: the number of g h for the numbers of g and h."""
    if group == "s5":
        return _table_of(list(permutations(range(5))))
    if group == "a5":
        return _table_of([p for p in permutations(range(5)) if _is_even(p)])
    if group == "z60":
        return _cyclic(60)
    alternating = _table_of([p for p in permutations(range(4)) if _is_even(p)])
    a, z = np.divmod(np.arange(60), 5)
    return 5 * alternating[a[:, None], a] + _cyclic(5)[z[:, None], z]


def _cyclic(order: int) -> np.ndarray:
    return (np.arange(order)[:, None] + np.arange(order)) % order


def _table_of(elements: list[tuple[int, ...]]) -> np.ndarray:
    numbers = {element: number for number, element in enumerate(elements)}
    return np.array([[numbers[tuple(h[x] for x in g)] for h in elements] for g in elements])


def _is_even(permutation: tuple[int, ...]) -> bool:
    size = range(len(permutation))
    return sum(permutation[i] > permutation[j] for j in size for i in range(j)) % 2 == 0
