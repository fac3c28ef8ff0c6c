"""Flip-flop language modelling (FFLM, arXiv 2306.00946, section 3)."""

from typing import Literal

import numpy as np

from mixtron.launch.synthetic import task
from mixtron.launch.synthetic.draws import Draws
from mixtron.launch.synthetic.task import Examples, MixedFraction

WRITE, READ, IGNORE, ZERO = 0, 1, 2, 3


class Task(task.Task):
    """FFL(p): instructions in turn with bits; a read's bit is the last that was written.

        w 1  i 0  i 1  r 1  w 0  r 0
                       1         0       to be answered

    `ignore` is p; writes and reads share the rest evenly; the first instruction is a write and the
    last a read; bits after writes and ignores are uniform. Loss on reads alone (the paper's clean
    mode). The paper trains FFL(0.8) of 512 tokens and tests sparse FFL(0.98) and dense FFL(0.1).
    """

    task: Literal["flip_flop"] = "flip_flop"  # pyright: ignore[reportIncompatibleVariableOverride]
    ignore: MixedFraction = [0.8]

    def vocabulary(self) -> int:
        return 5

    def chance(self) -> float:
        return 0.5

    def evaluation_grid(self, length: int) -> dict[str, list]:
        return {"length": [length], "ignore": list(dict.fromkeys([*self.ignore, 0.98, 0.1]))}

    def misfit(self, length: int) -> str | None:
        if length % 2 or length < 4:
            return "the length must be even and at least 4"
        return None

    def generate(self, draws: Draws, length: int) -> Examples:
        ignore, steps = self.ignore[0], length // 2
        made = Examples.blank(len(draws), length)
        drawn = draws.uniform(steps)
        instruction = np.where(drawn < ignore, IGNORE, READ)
        instruction[drawn >= ignore + (1 - ignore) / 2] = WRITE
        instruction[:, 0], instruction[:, -1] = WRITE, READ
        bits = draws.integers(0, 2, steps) + ZERO
        written_at = np.maximum.accumulate(
            np.where(instruction == WRITE, np.arange(steps), -1), axis=1
        )
        reads = instruction == READ
        bits = np.where(reads, np.take_along_axis(bits, written_at, 1), bits)
        made.inputs_NT[:, 0::2], made.inputs_NT[:, 1::2] = instruction, bits
        rows, places = np.nonzero(reads)
        made.ask((rows, 2 * places), bits[reads])
        return made
