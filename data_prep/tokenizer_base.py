"""What every tokenizer can do."""

import hashlib
from abc import ABC, abstractmethod

import numpy as np

from mixtron.data_prep.errors import DataError


class Tokenizer(ABC):
    """Text in documents is text: unless asked, it never becomes a special token."""

    type: str
    """`sentencepiece`, `huggingface` or `tiktoken`."""
    vocab_size: int
    """Largest id plus 1, added tokens included."""
    special: dict[str, int]
    """Special tokens, those that text never becomes."""
    eod_id: int
    """Id of the end-of-document token."""
    sha256: str
    """Of the tokenizer's bytes and the end-of-document id."""

    @abstractmethod
    def encode_each(self, texts: list[str]) -> list[np.ndarray]:
        """One uint32 array of ids for each text, without special tokens around it.

        Raises:
            ValueError: one of the texts cannot be encoded.
        """

    @abstractmethod
    def decode(self, ids: list[int] | np.ndarray) -> str:
        """The text of ids; special tokens appear by their names or not at all."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """`encode_each` in int64, with which one can reckon."""
        return [ids.astype(np.int64) for ids in self.encode_each(texts)]

    def special_id(self, token: str) -> int:
        """Raises DataError, with the candidates, when it is no special token."""
        if token not in self.special:
            raise DataError(f"{token!r} is not a special token ({', '.join(self.special)})")
        return self.special[token]


class CheckedTokenizer(Tokenizer):
    """A faster way to the ids of a plain tokenizer, held against it."""

    engine: str
    """What is named when ids differ."""
    advice: str
    """What to do then."""

    def __init__(self, plain: Tokenizer) -> None:
        self.plain = plain
        self.type, self.vocab_size, self.special = plain.type, plain.vocab_size, plain.special
        self.eod_id, self.sha256 = plain.eod_id, plain.sha256

    def decode(self, ids: list[int] | np.ndarray) -> str:
        return self.plain.decode(ids)

    def check(self, texts: list[str], where: str) -> None:
        """Raises DataError when an id of these texts differs from the plain tokenizer's."""
        for text, fast, plain in zip(
            texts, self.encode_batch(texts), self.plain.encode_batch(texts), strict=True
        ):
            if not np.array_equal(fast, plain):
                first = next(
                    (i for i, (a, b) in enumerate(zip(fast, plain, strict=False)) if a != b),
                    min(len(fast), len(plain)),
                )
                raise DataError(
                    f"{where}: {self.engine} and the plain tokenizer differ at token {first} of "
                    f"the document that begins {text[:40]!r}; {self.advice}"
                )


def fingerprint(kind: str, content: bytes, eod_id: int) -> str:
    """Tokenizers of equal fingerprint give equal shards."""
    digest = hashlib.sha256(content).hexdigest()
    return hashlib.sha256(f"{kind} {digest} eod {eod_id}".encode()).hexdigest()
