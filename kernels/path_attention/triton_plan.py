"""How the kernels are cut and launched, by GPU: a table, no search at run time, which would let
ranks differ."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.path_attention.segment import documents


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
    keys=Launch(warps=8, stages=2),
    queries=Launch(warps=8, stages=3),
)
"""The fastest of those found right on an H200 (README.md has others' times)."""
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


def launch_plan(device: torch.device) -> Plan:
    return LARGE if large(device) else SMALL


@dataclass(frozen=True)
class Layout:
    """How the tokens are cut."""

    heads: int
    """Query heads of a row of the inputs, which pieces of them are views of."""
    tile: int
    span: int
    """Tiles in a span."""
    lags: int
    """How many spans back a document reaches at most."""
    S: int
    """Tokens, filled up to whole tiles, or with maps to whole spans."""
    start_S: Tensor | None
    """[S] int32: where each token's document starts; None: one document a row."""
    end_S: Tensor | None


def span_tiles(tokens: int, C: int) -> int:
    """Tiles in a span, a power of 2 near the root of their number: a query has a version for about
    half the tiles of its span and for about half the spans."""
    tiles = max(1, -(-tokens // C))
    return 2 ** ((tiles.bit_length() - 1) // 2)


def layout_of(
    T: int, heads: int, C: int, maps: bool, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Layout:
    longest = T if max_seqlen is None else min(max_seqlen, T)
    span = span_tiles(longest, C) if maps else 1
    S = -(-T // (span * C)) * span * C
    # Two tokens of a document are at most longest - 1 apart, those of spans a lag of n apart at
    # least (n - 1) span C + 1.
    lags = min((longest - 2) // (span * C) + 1, S // (span * C) - 1) if longest > 1 else 0
    start_S = end_S = None
    if cu_seqlens is not None:
        bounds = F.pad(cu_seqlens.long(), (0, 1), value=S)
        document_S = documents(cu_seqlens, S, 0, cu_seqlens.device)
        start_S, end_S = bounds[document_S - 1].int(), bounds[document_S].int()
    return Layout(heads, C, span, lags, S, start_S, end_S)
