"""`mixtron generate`: texts continued, shown while they grow."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mixtron.data_prep.tokenizer import Tokenizer
from mixtron.launch.inference.decoding import Step, check_prompts, decode
from mixtron.launch.inference.model import Loaded
from mixtron.launch.inference.sampling import Sampling
from mixtron.launch.inference.source import Source

Say = Callable[[str], None]
"""Writes text as it is, at once."""


@dataclass
class Continuation:
    """A prompt and what has been added to it."""

    prompt: str
    ids: list[int]
    """Of the prompt, then of what was added."""
    tokenizer: Tokenizer
    added: int = 0
    ended: bool = False
    shown: int = 0
    """Characters that were given out."""

    def add(self, token: int | None) -> None:
        if token is None:
            self.ended = True
            return
        self.ids.append(token)
        self.added += 1

    def text(self) -> str:
        return self.tokenizer.decode(self.ids)

    def news(self) -> str:
        """What was not given out yet, without a last character that more bytes may complete."""
        text = self.text()
        if not self.ended and text.endswith("\ufffd"):
            text = text.rstrip("\ufffd")
        new = text[self.shown :]
        self.shown = max(self.shown, len(text))
        return new


@dataclass(frozen=True)
class Request:
    prompts: list[str]
    tokens: int
    sampling: Sampling = field(default_factory=Sampling)

    def ids(self, source: Source) -> list[list[int]]:
        """Raises ConfigError as `check_prompts` does."""
        encoded = [ids.tolist() for ids in source.tokenizer.encode_batch(self.prompts)]
        check_prompts(source, encoded, self.tokens)
        return encoded


def generate(loaded: Loaded, request: Request, say: Say, *, as_json: bool = False) -> list[str]:
    """Continues every prompt and returns the texts.

    A single text is given out while it grows; several (and JSON lines) one after another, each when
    it and those before it are complete.
    """
    source = loaded.source
    texts = [
        Continuation(prompt, ids, source.tokenizer)
        for prompt, ids in zip(request.prompts, request.ids(source), strict=True)
    ]
    prompts = [list(text.ids) for text in texts]
    steps = decode(loaded, prompts, request.tokens, request.sampling)
    if len(texts) == 1 and not as_json:
        _tell_growing(texts[0], steps, say)
    else:
        _tell_complete(texts, steps, say, as_json)
    return [text.text() for text in texts]


def _tell_growing(text: Continuation, steps: Iterator[Step], say: Say) -> None:
    say(text.news())
    for (token,) in steps:
        text.add(token)
        say(text.news())
    text.ended = True
    say(text.news() + "\n")


def _tell_complete(
    texts: list[Continuation], steps: Iterator[Step], say: Say, as_json: bool
) -> None:
    told = 0
    for step in steps:
        for text, token in zip(texts, step, strict=True):
            text.add(token)
        while told < len(texts) and texts[told].ended:
            say(_complete(texts, told, as_json))
            told += 1
    for number in range(told, len(texts)):
        say(_complete(texts, number, as_json))


def _complete(texts: list[Continuation], number: int, as_json: bool) -> str:
    text = texts[number]
    if as_json:
        row = {"prompt": text.prompt, "text": text.text(), "tokens": text.added}
        return json.dumps(row, ensure_ascii=False) + "\n"
    return f"--- {number + 1} of {len(texts)}\n{text.text()}\n"
