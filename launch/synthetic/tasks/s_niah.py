"""Single needle in a haystack (RULER, arXiv 2404.06654, section 3: S-NIAH), a word a token."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mixtron.launch.synthetic import task
from mixtron.launch.synthetic.draws import Draws, power_law_weights
from mixtron.launch.synthetic.task import Examples

KEY, VALUE = "<key>", "<value>"
PROMPT = (
    "A special magic number is hidden within the following text . Make sure to memorize it . "
    "I will quiz you about the number afterwards ."
)
NEEDLE = f"One of the special magic numbers for {KEY} is : {VALUE} ."
QUESTION = (
    f"What is the special magic number for {KEY} mentioned in the provided text ? "
    f"The special magic number for {KEY} mentioned in the provided text is {VALUE}"
)
NOISE = (
    "The grass is green . The sky is blue . The sun is yellow . Here we go . There and back again ."
)
SYMBOLS = "0123456789abcdef-"
WORDS = sorted(
    {
        word
        for text in (PROMPT, NEEDLE, QUESTION, NOISE)
        for kind in ("number", "uuid")
        for word in text.replace("number", kind).split()
    }
    - {KEY, VALUE}
)
IDS = {word: len(SYMBOLS) + i for i, word in enumerate(WORDS)}
FIRST_KEY = len(SYMBOLS) + len(WORDS)

FILLER_WORDS = 1024
SENTENCE = 16
"""Tokens of a sentence of filler words, with its full stop."""
DEPTHS = 40
UUID_RANDOM = np.array([i not in (8, 13, 14, 18, 19, 23) for i in range(36)])
"""Places of a UUID 4 that hold four random bits: not hyphens, version and variant."""


class Task(task.Task):
    """RULER's prompt, a haystack with one needle in it, and the question, answered.

    `noise` (S-NIAH-1) repeats RULER's five sentences, with the needle between any two; `words`
    stands for its essays (S-NIAH-2, and -3 with `uuid`): sentences of words of Zipf's law, with the
    needle at one of 40 depths. Numbers have 7 digits, a token each; of a UUID the hexadecimal
    digits that are random count. Ids: digits, the templates' words, keys, filler words.
    """

    task: Literal["s_niah"] = "s_niah"  # pyright: ignore[reportIncompatibleVariableOverride]
    haystack: Literal["noise", "words"] = "noise"
    value: Literal["number", "uuid"] = "number"
    keys: Annotated[int, Field(ge=2)] = 512
    """Words that a needle's key is drawn from."""

    def vocabulary(self) -> int:
        return FIRST_KEY + self.keys + FILLER_WORDS

    def chance(self) -> float:
        return 1 / 16 if self.value == "uuid" else (1 / 9 + 6 / 10) / 7

    def misfit(self, length: int) -> str | None:
        needed = self._fixed_tokens() + SENTENCE
        return f"at least {needed} tokens are needed" if length < needed else None

    def evaluation_grid(self, length: int) -> dict[str, list]:
        return {"length": [length * factor for factor in (1, 2, 4, 8)]}

    def generate(self, draws: Draws, length: int) -> Examples:
        made = Examples.blank(len(draws), length)
        key_N = FIRST_KEY + draws.integers(0, self.keys)
        value_ND = self._values(draws)
        prompt, needle, question = (
            _fill(text.replace("number", self.value), key_N, value_ND)
            for text in (PROMPT, NEEDLE, QUESTION)
        )
        hay, needle_at_N = self._haystack(draws, length - self._fixed_tokens())
        # Where each token of the haystack with its needle comes from.
        place = np.arange(hay.shape[1] + needle.shape[1])
        behind = place - needle_at_N[:, None]
        inside = (behind >= 0) & (behind < needle.shape[1])
        after = behind >= needle.shape[1]
        source = np.where(inside, hay.shape[1] + behind, place - after * needle.shape[1])
        context = np.take_along_axis(np.concatenate([hay, needle], axis=1), source, 1)
        whole = np.concatenate([prompt, context, question], axis=1)
        made.inputs_NT[:] = whole[:, :-1]
        random = UUID_RANDOM if self.value == "uuid" else np.ones(7, dtype=bool)
        made.ask(np.s_[:, length - len(random) + np.flatnonzero(random)], value_ND[:, random])
        return made

    def _fixed_tokens(self) -> int:
        """Of the input, without the haystack; the value's last digit is answered, never read."""
        digits = 36 if self.value == "uuid" else 7
        words = [word for text in (PROMPT, NEEDLE, QUESTION) for word in text.split()]
        return len(words) + 2 * (digits - 1) - 1

    def _values(self, draws: Draws) -> np.ndarray:
        """int64 [N, digits]."""
        if self.value == "number":
            return np.concatenate([draws.integers(1, 10, 1), draws.integers(0, 10, 6)], axis=1)
        digits = draws.integers(0, 16, 36)
        digits[:, [8, 13, 18, 23]] = SYMBOLS.index("-")
        digits[:, 14] = 4
        digits[:, 19] = 8 + digits[:, 19] % 4
        return digits

    def _haystack(self, draws: Draws, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [N, tokens] and [N]: where in it, between sentences, the needle goes."""
        if self.haystack == "noise":
            sentences = np.array([IDS[word] for word in NOISE.split()])
            hay = np.tile(np.resize(sentences, tokens), (len(draws), 1))
            ends = np.flatnonzero(hay[0] == IDS["."]) + 1
            return hay, np.append(0, ends)[draws.integers(0, len(ends) + 1)]
        words = draws.weighted(power_law_weights(FILLER_WORDS, -1.0), tokens)
        hay = FIRST_KEY + self.keys + words
        hay[:, SENTENCE - 1 :: SENTENCE] = IDS["."]
        sentences = tokens // SENTENCE
        return hay, SENTENCE * (draws.integers(0, DEPTHS) * sentences // (DEPTHS - 1))


def _fill(template: str, key_N: np.ndarray, value_ND: np.ndarray) -> np.ndarray:
    """int64 [N, tokens]."""
    parts = []
    for word in template.split():
        if word == VALUE:
            parts.append(value_ND)
        elif word == KEY:
            parts.append(key_N[:, None])
        else:
            parts.append(np.full((len(key_N), 1), IDS[word]))
    return np.concatenate(parts, axis=1)
