"""Multi-query associative recall (Zoology, arXiv 2312.04927, appendix on the synthetic)."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from mixtron.launch.synthetic import task
from mixtron.launch.synthetic.draws import Draws, power_law_weights
from mixtron.launch.synthetic.task import Examples, Mixed


class Task(task.Task):
    """`pairs` keys, each with a value behind it; then each key once more, in a gap of even length.

        k1 v1 k2 v2 ... kP vP  0 0 k2 0 0 0 k1 0 ...
                                   v2       v1          to be answered

    Keys are 1 to V/2 - 1, values V/2 to V - 1, 0 is the blank. Slot i (from 1) of those behind the
    pairs, each two tokens wide, is taken by the next key with probability proportional to
    i^(power - 1), each slot once.
    """

    task: Literal["mqar"] = "mqar"  # pyright: ignore[reportIncompatibleVariableOverride]
    pairs: Mixed = [8]
    vocab_size: Annotated[int, Field(ge=4)] = 8192
    power: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """Of the gaps' distribution: near 0 most queries come soon, 1 is uniform."""
    filler: Literal["blank", "random"] = "blank"
    """Between the queries: 0, as in the published runs, or tokens of the whole vocabulary."""

    load: ClassVar[str | None] = "pairs"

    def vocabulary(self) -> int:
        return self.vocab_size

    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def misfit(self, length: int) -> str | None:
        pairs = self.pairs[0]
        if length % 2:
            return f"the length must be even; nearest: {length - 1}, {length + 1}"
        if 4 * pairs > length:
            return f"pairs={pairs} need {4 * pairs} tokens; pairs up to {length // 4} fit"
        keys = self.vocab_size // 2 - 1
        if pairs > keys:
            return f"vocab_size={self.vocab_size} has {keys} keys for pairs={pairs}; raise it"
        return None

    def generate(self, draws: Draws, length: int) -> Examples:
        pairs, half = self.pairs[0], self.vocab_size // 2
        made = Examples.blank(len(draws), length)
        keys_NP = draws.distinct(1, half, pairs)
        values_NP = draws.distinct(half, self.vocab_size, pairs)
        slots = (length - 2 * pairs) // 2
        slots_NP = draws.weighted_distinct(power_law_weights(slots, self.power - 1), pairs)
        if self.filler == "random":
            made.inputs_NT[:] = draws.integers(0, self.vocab_size, length)
        made.inputs_NT[:, 0 : 2 * pairs : 2] = keys_NP
        made.inputs_NT[:, 1 : 2 * pairs : 2] = values_NP
        at = np.arange(len(draws))[:, None], 2 * pairs + 2 * slots_NP
        made.inputs_NT[at] = keys_NP
        made.ask(at, values_NP)
        return made
