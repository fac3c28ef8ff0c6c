"""The Fenwick tree over a document's positions, in integers on the host, and its chunks.

A position is a number of tokens, or the 0-based place of the token that follows them. The past
[0, t) of token t is split into the nodes of t's binary digits: bit b, where it is set, stands for
the node [a, a + 2^b) with a = (t >> (b+1)) << (b+1). Seen from token t, node b is level b + 1, and
the token itself level 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def required_levels(tokens: int) -> int:
    """1 + ceil(log2 tokens): as many levels as a document of this many tokens has."""
    return 1 + (tokens - 1).bit_length()


def bits(position: int) -> list[int]:
    """The nodes of a position, oldest tokens (largest node) last."""
    return [b for b in range(position.bit_length()) if position >> b & 1]


def node_start(position: int, bit: int) -> int:
    """The first token of one of a position's nodes."""
    return position >> (bit + 1) << (bit + 1)


def node_of(token: int, position: int) -> int:
    """The bit of the position's node that holds an earlier token. Also that of an earlier node, by
    any of its tokens: nodes lie inside those of later positions."""
    return (token ^ position).bit_length() - 1


@dataclass(frozen=True)
class Chunks:
    """Consecutive tokens of a stream in chunks of C slots, each of one document and beginning at a
    multiple of C of its positions: so a chunk's slots split like a tree of C tokens."""

    tokens: slice
    """Of the stream."""
    position: int
    """Of the first token in its document."""
    token_of_slot: np.ndarray
    """[N C] int64: which of the tokens lies there; an empty slot names the token 0."""
    filled: np.ndarray
    """[N C] bool: whether the slot holds a token."""
    slot_of_token: np.ndarray
    """[tokens] int64."""
    index: np.ndarray
    """[N] int64: the chunk's number in its document."""
    following: np.ndarray
    """[N] int64: the number of the chunk after it in the same document; 0 where none comes."""


def chunk_tokens(lengths: Sequence[int], position: int, chunk_length: int) -> Chunks:
    """Cuts documents into chunks.

    Args:
        lengths: tokens of each document; the first goes on from its position `position`.
    """
    C, length = chunk_length, np.asarray(lengths, dtype=np.int64)
    start = np.zeros_like(length)
    start[0] = position
    first = start // C
    count = -(-(start + length) // C) - first
    chunks_before = count.cumsum() - count
    tokens_before = length.cumsum() - length
    T, N = int(length.sum()), int(count.sum())
    shift = chunks_before * C + start % C - tokens_before
    slot_of_token = np.arange(T) + shift.repeat(length)
    token_of_slot = np.zeros(N * C, dtype=np.int64)
    token_of_slot[slot_of_token] = np.arange(T)
    filled = np.zeros(N * C, dtype=bool)
    filled[slot_of_token] = True
    index = np.arange(N) + (first - chunks_before).repeat(count)
    following = index + 1
    following[count.cumsum() - 1] = 0
    return Chunks(slice(0, T), position, token_of_slot, filled, slot_of_token, index, following)


def slice_chunks(chunks: Chunks, first: int, end: int) -> Chunks:
    """The chunks first .. end - 1 of these."""
    C = len(chunks.filled) // len(chunks.index)
    begin, stop = (int(x) for x in np.searchsorted(chunks.slot_of_token, (first * C, end * C)))
    filled = chunks.filled[first * C : end * C]
    return Chunks(
        slice(chunks.tokens.start + begin, chunks.tokens.start + stop),
        chunks.position if first == 0 else int(chunks.index[first]) * C,
        np.where(filled, chunks.token_of_slot[first * C : end * C] - begin, 0),
        filled,
        chunks.slot_of_token[begin:stop] - first * C,
        chunks.index[first:end],
        chunks.following[first:end],
    )


def level_masks(chunk_length: int) -> np.ndarray:
    """[levels, C, C] bool: whether slot j lies in slot i's bucket of that level."""
    slots = np.arange(chunk_length)
    distance = slots[:, None] ^ slots
    level = np.ceil(np.log2(distance + 1)).astype(np.int64)
    future = slots[:, None] < slots
    masks = level == np.arange(required_levels(chunk_length))[:, None, None]
    return masks & ~future
