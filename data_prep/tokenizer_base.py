"""What every tokenizer can do."""

import hashlib
from abc import ABC, abstractmethod
from itertools import chain

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
    def encode_flat(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts one after another, and int64 [texts] how many each has.

        Raises:
            ValueError: one of the texts cannot be encoded.
        """

    @abstractmethod
    def decode(self, ids: list[int] | np.ndarray) -> str:
        """The text of ids; special tokens appear by their names or not at all."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One int64 array of ids for each text, without special tokens around it."""
        ids, lengths = self.encode_flat(texts)
        return np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])

    def special_id(self, token: str) -> int:
        """Raises DataError, with the candidates, when it is no special token."""
        if token not in self.special:
            raise DataError(f"{token!r} is not a special token ({', '.join(self.special)})")
        return self.special[token]


def flatten(encoded: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of ids as one int64 array, and their lengths."""
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    return np.fromiter(chain.from_iterable(encoded), np.int64, int(lengths.sum())), lengths


def fingerprint(kind: str, content: bytes, eod_id: int) -> str:
    """Tokenizers of equal fingerprint give equal shards."""
    digest = hashlib.sha256(content).hexdigest()
    return hashlib.sha256(f"{kind} {digest} eod {eod_id}".encode()).hexdigest()
