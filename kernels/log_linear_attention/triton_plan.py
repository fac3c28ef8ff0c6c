"""Where the Triton form's chunks, nodes and sums lie, in integers on the host.

Chunk c of a document, as c + 1 ends in a set bit m and zeros, completes the node of the 2^m chunks
up to c: exactly one, so the tree has a slot a chunk. Those of the document's tokens before token 0
that are at least a chunk have slots behind them. What later chunks read of a node is summed up in
parts of at most PART_CHUNKS chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mixtron.kernels.log_linear_attention.fenwick import chunk_tokens

PART_CHUNKS = 16
MAX_STRETCHES = 16
SPLIT_BITS = (0, 4, 7)
"""Where the delta base's scan is split: each launch carries the nodes from one of these bits up to
the next on, in blocks of chunks that begin with none of them."""


@dataclass(frozen=True)
class ScanRange:
    """The nodes of bits low .. high - 1; the last range has all from low on."""

    low: int
    high: int
    groups: int
    group_R2: Tensor
    """The first chunk, and the end, of blocks that are scanned side by side."""
    arriving: int
    arrival_N: Tensor
    """How many nodes of bit `low` or above the chunks before each one complete."""

    @property
    def slots(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class TreePlan:
    """Tables of int32 on the device; N chunks, S slots, M bits of the largest chunk number."""

    chunks: int
    slots: int
    bits: int
    parts: int
    chunk_N4: Tensor
    """Of a chunk: the token in its slot 0 (before the stream, if that slot is empty), its first
    filled slot and the end of the filled ones, its number in the document."""
    node_S4: Tensor
    """Of a slot's node: its bit, the chunk that completes the node that it becomes part of (or -1),
    its first part and how many it has."""
    part_P4: Tensor
    """Of a part: the bit, the first of the chunks that read the node, and how many."""
    live_MN: Tensor
    """int64: the slot of the node of bit m that chunk n reads; `slots` where it reads none."""
    chunk_T: Tensor
    """int64: the chunk of a token."""
    first_number: int
    """Of the first chunk in its document."""
    live: int
    """How many nodes all chunks read."""
    live_N: Tensor
    """How many the chunks before each one read."""
    following_N: Tensor
    """The number of the chunk after it in the same document; 0 where none comes."""
    stretches: int
    stretch_R2: Tensor
    """The first chunk, and the end, of each stretch of whole documents: scans run through these
    side by side."""
    ranges: tuple[ScanRange, ...]


@lru_cache(maxsize=64)
def tree_plan(
    lengths: tuple[int, ...], position: int, chunk_length: int, device: torch.device
) -> TreePlan:
    """Of documents of these lengths; the first goes on from its position `position`."""
    chunks = chunk_tokens(lengths, position, chunk_length)
    N, C, index = len(chunks.index), chunk_length, chunks.index
    filled = chunks.filled.reshape(N, C)
    begin, end = filled.argmax(1), C - filled[:, ::-1].argmax(1)
    first = chunks.token_of_slot.reshape(N, C)[np.arange(N), begin] - begin
    M = int(index.max()).bit_length()
    S = N + int(index[0]).bit_length()
    node_S4, part_P4 = _nodes(index, chunks.following, S)
    bit_M1 = np.arange(M)[:, None]
    before_MN = np.arange(N) - (index & (1 << bit_M1) - 1) - 1
    live_MN = np.where(before_MN < 0, N + bit_M1, before_MN)
    live_MN = np.where(index >> bit_M1 & 1, live_MN, S)

    read_N = (index >> bit_M1 & 1).sum(0)
    stretches = _stretches(chunks.following)

    def on_device(x: Sequence | np.ndarray, dtype: type) -> Tensor:
        return torch.tensor(np.asarray(x, dtype=dtype)).to(device, non_blocking=True)

    ranges = []
    for low, high in _bit_ranges(M):
        last = high > M
        groups = stretches if last else _groups(index, chunks.following, 1 << high)
        arrives_N = (index + 1) % (1 << low) == 0
        arrival_N = on_device(arrives_N.cumsum() - arrives_N, np.int32)
        group_R2 = on_device(groups, np.int32)
        ranges.append(ScanRange(low, high, len(groups), group_R2, int(arrives_N.sum()), arrival_N))

    return TreePlan(
        chunks=N,
        slots=S,
        bits=M,
        parts=len(part_P4),
        chunk_N4=on_device(np.stack([first, begin, end, index], axis=1), np.int32),
        node_S4=on_device(node_S4, np.int32),
        part_P4=on_device(part_P4 or [(0, 0, 0, 0)], np.int32),
        live_MN=on_device(live_MN, np.int64),
        chunk_T=on_device(chunks.slot_of_token // C, np.int64),
        first_number=int(index[0]),
        live=int(read_N.sum()),
        live_N=on_device(read_N.cumsum() - read_N, np.int32),
        following_N=on_device(chunks.following, np.int32),
        stretches=len(stretches),
        stretch_R2=on_device(stretches, np.int32),
        ranges=tuple(ranges),
    )


def _nodes(
    index_N: np.ndarray, following_N: np.ndarray, slots: int
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
    """Of each slot's node, and of the parts of what is read of it."""
    N = len(index_N)
    last_N = _last_of_document(following_N)
    # A slot's node ends where chunk `after` begins; those of bits that the first position lacks
    # are nobody's.
    ends = [(n + 1, int(index_N[n]) + 1) for n in range(N)]
    number = int(index_N[0])
    for b in range(slots - N):
        ends.append(((number >> b << b) - number, number >> b << b if number >> b & 1 else 0))
    nodes, parts = [], []
    for slot, (after, number_after) in enumerate(ends):
        if number_after == 0:
            nodes.append((0, -1, len(parts), 0))
            continue
        b = (number_after & -number_after).bit_length() - 1
        last = int(last_N[slot] if slot < N else last_N[0])
        read_from, read_to = max(after, 0), min(after + (1 << b), last + 1)
        parent = after + (1 << b) - 1
        first_part = len(parts)
        for begin in range(read_from, read_to, PART_CHUNKS):
            parts.append((b, begin, min(PART_CHUNKS, read_to - begin), 0))
        nodes.append((b, parent if parent <= last else -1, first_part, len(parts) - first_part))
    return nodes, parts


def _bit_ranges(bits: int) -> list[tuple[int, int]]:
    """The last has a slot for the node that a chunk of so many bits may complete."""
    lows = [low for low in SPLIT_BITS if low == 0 or low < bits]
    return list(zip(lows, [*lows[1:], bits + 1], strict=True))


def _groups(index_N: np.ndarray, following_N: np.ndarray, block: int) -> list[tuple[int, int]]:
    """Blocks that begin a document or at a multiple of `block` chunks of one, the short ones
    together."""
    N = len(index_N)
    begins_N = (index_N % block == 0) | (np.arange(N) == 0)
    begins_N[1:] |= following_N[:-1] == 0
    first = []
    for n in np.flatnonzero(begins_N).tolist():
        if not first or n - first[-1] >= block:
            first.append(n)
    return list(zip(first, [*first[1:], N], strict=True))


def _stretches(following_N: np.ndarray) -> list[tuple[int, int]]:
    """At most MAX_STRETCHES, about as long as each other."""
    N = len(following_N)
    starts = np.concatenate([[0], np.flatnonzero(following_N[:-1] == 0) + 1])
    wanted = np.arange(MAX_STRETCHES)[:, None] * N / MAX_STRETCHES
    first = np.unique(starts[np.abs(starts - wanted).argmin(1)]).tolist()
    return list(zip(first, [*first[1:], N], strict=True))


def _last_of_document(following_N: np.ndarray) -> np.ndarray:
    """The last chunk of the document that each chunk lies in."""
    ends = np.flatnonzero(following_N == 0)
    return ends[np.searchsorted(ends, np.arange(len(following_N)))]
