"""How the kernels are cut and launched, by GPU: a table, no search at run time, which would let
ranks differ."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.path_attention.segment import documents
from mixtron.kernels.recurrence import once


@dataclass(frozen=True)
class Launch:
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    tile: int
    """Tokens that one program owns; with maps also those of a UT transform."""
    block: int
    """Tokens that it walks over at a time."""
    forward: Launch
    keys: Launch
    queries: Launch


SHARED_MEMORY_BYTES = 224 * 2**10
"""Of a block on an H100 or H200. The maps' kernels need up to 192 KiB."""
LARGE = Plan(
    tile=128,
    block=64,
    forward=Launch(warps=8, stages=3),
    keys=Launch(warps=8, stages=3),
    queries=Launch(warps=8, stages=3),
)
LARGE_NARROW = replace(LARGE, forward=Launch(warps=4, stages=3))
"""The fastest of those found right on an H200 (README.md has others' times); for heads of 64, of
which two forward programs fit a multiprocessor."""
SMALL = Plan(
    tile=128,
    block=64,
    forward=Launch(warps=8, stages=2),
    keys=Launch(warps=8, stages=2),
    queries=Launch(warps=8, stages=2),
)
"""148 KiB of shared memory when compiled for an H100, of an A100's 163; not run on one."""


def large(device: torch.device) -> bool:
    if device.type != "cuda":  # the interpreter
        return True
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin >= SHARED_MEMORY_BYTES


def launch_plan(device: torch.device, width: int) -> Plan:
    """For K and V of at most `width`."""
    if not large(device):
        return SMALL
    return LARGE if width > 64 else LARGE_NARROW


def warp_specialized(device: torch.device, K: int, V: int) -> bool:
    """Whether attention with maps is that of hopper_*.py."""
    if device.type != "cuda" or (K, V) != (128, 128):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@dataclass(frozen=True)
class Layout:
    """How the tokens are cut, and the tree of their tiles (triton_tree.py)."""

    heads: int
    """Query heads of a row of the inputs, which pieces of them are views of."""
    tile: int
    S: int
    """Tokens, filled up to whole tiles."""
    reach: int
    """How many tiles two tokens of a document are apart at most."""
    start_S: Tensor | None
    """[S] int32: where each token's document starts; None: one document a row."""
    end_S: Tensor | None

    @property
    def tiles(self) -> int:
        return self.S // self.tile

    @property
    def levels(self) -> int:
        """Levels that have a pair of siblings with queries and keys of one document."""
        return (self.tiles - 1).bit_length() if self.reach else 0

    @property
    def crossed_levels(self) -> int:
        """Levels whose nodes have queries and keys of one document on both sides."""
        return sum(2 << n < self.tiles and 1 << n < self.reach for n in range(self.levels))

    @property
    def versions(self) -> int:
        """Room for tiles of queries, and of keys, in versions."""
        return sum(self.versions_at(n) for n in range(self.levels))

    def versions_at(self, level: int) -> int:
        pairs = (((self.tiles - 1) >> level) + 1) // 2
        return pairs * min(1 << level, self.reach)

    @property
    def nodes(self) -> int:
        """Of which all tiles are there."""
        return sum(self.tiles >> n for n in range(max(1, self.levels)))


def layout_of(
    T: int, heads: int, C: int, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Layout:
    S = -(-T // C) * C
    longest = T if max_seqlen is None else min(max_seqlen, T)
    # Two tokens of a document are at most longest - 1 apart, those of tiles n apart at least
    # (n - 1) C + 1.
    reach = min((longest - 2) // C + 1, S // C - 1) if longest > 1 else 0
    start_S = end_S = None
    if cu_seqlens is not None:
        start_S, end_S = once(cu_seqlens, ("bounds", S), lambda: _bounds(cu_seqlens, S))
    return Layout(heads, C, S, reach, start_S, end_S)


def _bounds(cu_seqlens: Tensor, S: int) -> tuple[Tensor, Tensor]:
    """[S] int32 each: where every token's document starts and ends."""
    bounds = F.pad(cu_seqlens.long(), (0, 1), value=S)
    document_S = documents(cu_seqlens, S, 0, cu_seqlens.device)
    return bounds[document_S - 1].int(), bounds[document_S].int()
