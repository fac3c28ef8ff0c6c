"""Selective copying (Mamba, arXiv 2312.00752, section 4.1.1)."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from mixtron.launch.synthetic import task
from mixtron.launch.synthetic.draws import Draws
from mixtron.launch.synthetic.task import Examples, Mixed


class Task(task.Task):
    """`copied` tokens scattered among noise; then as many markers, at which they are to be said.

        0 0 a 0 b 0 0 0 c 0  M M M
                             a b c      to be answered

    Noise is 0, the tokens 1 to A - 2, the marker A - 1 (A = `alphabet`); places are uniform. In
    the paper: 16 of 16, and 4,096 tokens before the markers.
    """

    task: Literal["selective_copying"] = "selective_copying"  # pyright: ignore[reportIncompatibleVariableOverride]
    copied: Mixed = [16]
    alphabet: Annotated[int, Field(ge=4)] = 16

    load: ClassVar[str | None] = "copied"

    def vocabulary(self) -> int:
        return self.alphabet

    def chance(self) -> float:
        return 1 / (self.alphabet - 2)

    def misfit(self, length: int) -> str | None:
        copied = self.copied[0]
        if 2 * copied > length:
            return f"copied={copied} needs {2 * copied} tokens; copied up to {length // 2} fits"
        return None

    def generate(self, draws: Draws, length: int) -> Examples:
        copied = self.copied[0]
        made = Examples.blank(len(draws), length)
        tokens = draws.integers(1, self.alphabet - 1, copied)
        places = np.sort(draws.distinct(0, length - copied, copied), axis=1)
        np.put_along_axis(made.inputs_NT, places, tokens, 1)
        made.inputs_NT[:, length - copied :] = self.alphabet - 1
        made.ask(np.s_[:, length - copied :], tokens)
        return made
