"""Which tiles of the permuted order meet which: what a kernel visits, and what it may skip.

The slots of the permuted order are cut into segments, and inside a segment sorted by position in
the stream. Attention sums over a set, so the result stays the same; but early and late tokens come
to lie in different tiles, and tiles of keys that come after all of a tile's queries are skipped.
Everything is computed on the device with sizes known on the host: nothing waits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.windowed_attention import triton_plan
from mixtron.kernels.windowed_attention.permutation import Backend, document_bounds
from mixtron.kernels.windowed_attention.window import WindowSide, window_reach

TILE = 64
NOTHING = torch.iinfo(torch.int32).max
"""The token of an empty slot: comes after all, in a document that starts after all."""


@dataclass(frozen=True)
class Tiles:
    """Slots in the order in which tiles take them, C to a tile. [N, C] int32 each."""

    row_NC: Tensor
    """Of q and o, or of k and v; `rows` for an empty slot."""
    slot_NC: Tensor
    token_NC: Tensor
    """Position in the stream."""
    start_NC: Tensor
    """Where the token's document starts in the stream."""
    extent_7N: Tensor
    """`Extent`, stacked."""
    rows: int
    segment: int
    first_slot: int

    @property
    def tile(self) -> int:
        """Slots in a tile."""
        return self.slot_NC.shape[1]


class Extent(NamedTuple):
    """Of each tile; where its slots are empty, the first are NOTHING and the last -1."""

    first_slot: Tensor
    last_slot: Tensor
    first_token: Tensor
    last_token: Tensor
    first_start: Tensor
    last_start: Tensor
    filled: Tensor
    """1: no slot is empty."""


@dataclass(frozen=True)
class TileLists:
    """For each of N tiles, those of the other side that it must meet. int32."""

    tiles_NM: Tensor
    """The first `count_N` of a row count; of these the first `whole_N` need no mask."""
    count_N: Tensor
    whole_N: Tensor
    """Tiles with which every pair of a query and a key attends."""


@dataclass(frozen=True)
class WindowPlan:
    """Everything of windowed attention that does not depend on q, k and v."""

    before: int
    after: int
    queries: Tiles
    keys: Tiles
    keys_of_queries: TileLists
    queries_of_keys: TileLists
    plain: bool
    """Each row is its slot of the piece: kernels read rows where they follow one another."""


def plan_windows(
    order_T: Tensor | range,
    cu_seqlens: Tensor,
    *,
    window: int,
    window_side: WindowSide,
    tokens: int | None = None,
    query_slots: range | None = None,
    key_slots: range | None = None,
    query_row_S: Tensor | None = None,
    key_row_S: Tensor | None = None,
    query_tile: int = TILE,
    key_tile: int = TILE,
    backend: Backend = "tiled",
) -> WindowPlan:
    """Plans attention over the permuted order, or over a piece of it.

    Args:
        order_T      [T] int64: the token at each slot; a permutation inside each document.
                     range(T): the plain order, whose pieces' rows are their slots in turn.
        cu_seqlens   [N+1] int32 or int64: where documents start, ending with T, maybe repeated.
        window       slots a token sees, its own included; fewer at a document's ends.
        window_side  two: window // 2 before and (window - 1) // 2 after its own; one: all before.
        tokens       slots of tokens from this number on are empty (the tokens are yet to come).
        query_slots, key_slots   the pieces that q and that k and v hold; None: all.
        query_row_S, key_row_S   for each slot of the piece, its row in q (and o), in k and v;
                                 None: the token itself.
        query_tile, key_tile     slots in a tile of either side, a power of two up to a segment.
        backend      "tiled" in torch on any device, "triton" on a GPU: the same plan.
    Raises:
        ValueError: a window below 1, an unknown side, or an order that is not [T] int64.
    """
    plain = isinstance(order_T, range)
    if isinstance(order_T, range):
        order_T = torch.arange(len(order_T), device=cu_seqlens.device)
    if order_T.dim() != 1 or order_T.dtype != torch.int64:
        raise ValueError(f"order_T is {order_T.dtype} {list(order_T.shape)}, expected int64 [T]")
    slots = len(order_T)
    before, after = (min(reach, slots) for reach in window_reach(window, window_side))
    start_T, _ = document_bounds(cu_seqlens, slots)
    tokens = slots if tokens is None else tokens
    segment = max(segment_length(window), query_tile, key_tile)

    def tiles(piece: range | None, row_S: Tensor | None, tile: int) -> Tiles:
        piece = range(slots) if piece is None else piece
        if plain:
            row_S = torch.arange(len(piece), device=cu_seqlens.device)
        token_S, start_S = (x[piece.start : piece.stop] for x in (order_T, start_T))
        return _tiles(
            row_S,
            token_S,
            start_S,
            rows=tokens if row_S is None else len(row_S),
            tokens=tokens,
            segment=segment,
            first_slot=piece.start,
            tile=tile,
            backend=backend,
        )

    queries = tiles(query_slots, query_row_S, query_tile)
    same = (query_slots, query_tile) == (key_slots, key_tile) and query_row_S is key_row_S
    keys = queries if same else tiles(key_slots, key_row_S, key_tile)
    return WindowPlan(
        before,
        after,
        queries,
        keys,
        _tile_lists(queries, keys, before, after, causal=1, backend=backend),
        _tile_lists(keys, queries, after, before, causal=-1, backend=backend),
        plain,
    )


def segment_length(window: int) -> int:
    """Slots sorted together: more skip more of the future, but reach farther than the window."""
    return TILE * (1 if window < 256 else 2 if window < 512 else 4 if window < 2048 else 8)


def _tiles(
    row_S: Tensor | None,
    token_S: Tensor,
    start_S: Tensor,
    *,
    rows: int,
    tokens: int,
    segment: int,
    first_slot: int,
    tile: int,
    backend: Backend,
) -> Tiles:
    where = {"rows": rows, "tokens": tokens, "segment": segment, "first_slot": first_slot}
    make = triton_plan.tiles if backend == "triton" else _tiles_torch
    values_4NC, extent_7N = make(row_S, token_S, start_S, **where, tile=tile)
    row_NC, slot_NC, token_NC, start_NC = values_4NC
    return Tiles(row_NC, slot_NC, token_NC, start_NC, extent_7N, rows, segment, first_slot)


def _tiles_torch(
    row_S: Tensor | None,
    token_S: Tensor,
    start_S: Tensor,
    *,
    rows: int,
    tokens: int,
    segment: int,
    first_slot: int,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """As `triton_plan.tiles`."""
    row_S = token_S if row_S is None else row_S
    empty_S = token_S >= tokens
    padding = (0, -len(token_S) % segment)
    token_S = F.pad(token_S.masked_fill(empty_S, NOTHING), padding, value=NOTHING)
    start_S = F.pad(start_S.masked_fill(empty_S, NOTHING), padding, value=NOTHING)
    row_S = F.pad(row_S.masked_fill(empty_S, rows), padding, value=rows)
    slot_S = torch.arange(len(token_S), device=token_S.device)
    by_token_NS = token_S.unflatten(0, (-1, segment)).argsort(dim=1, stable=True)
    by_token_S = (slot_S[::segment, None] + by_token_NS).flatten()
    values_4S = torch.stack([row_S, slot_S + first_slot, token_S, start_S])[:, by_token_S].int()
    values_4NC = values_4S.unflatten(1, (-1, tile))
    _, slot_NC, token_NC, start_NC = values_4NC
    empty_NC = token_NC == NOTHING
    extent = Extent(
        slot_NC.amin(1),
        slot_NC.amax(1),
        token_NC.amin(1),
        token_NC.masked_fill(empty_NC, -1).amax(1),
        start_NC.amin(1),
        start_NC.masked_fill(empty_NC, -1).amax(1),
        (~empty_NC).all(1).int(),
    )
    return values_4NC, torch.stack(extent)


def _tile_lists(
    mine: Tiles, others: Tiles, before: int, after: int, *, causal: int, backend: Backend
) -> TileLists:
    """For each of my tiles, others' tiles of which a slot may lie in `before` .. `after` of one of
    its own, and whose tokens are not all later (causal = 1) or all earlier (-1)."""
    segment, count = mine.segment, len(others.slot_NC)
    # My segments and the others' are cut at other slots, but always in the same way.
    offset = mine.first_slot - others.first_slot
    first = (offset - before) // segment
    last = (offset + segment - 1 + after) // segment
    step = segment // others.tile
    first, most = first * step, (last + 1 - first) * step
    if most >= count:
        first, step, most = 0, 0, count
    near = (first, segment // mine.tile, step)
    make = triton_plan.tile_lists if backend == "triton" else _tile_lists_torch
    lists = make(mine.extent_7N, others.extent_7N, near, most, before, after, causal=causal)
    return TileLists(*lists)


def _tile_lists_torch(
    ours_7N: Tensor,
    theirs_7N: Tensor,
    near: tuple[int, int, int],
    most: int,
    before: int,
    after: int,
    *,
    causal: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `triton_plan.tile_lists`."""
    first, in_segment, step = near
    device, count = ours_7N.device, theirs_7N.shape[1]
    segment_N = torch.arange(ours_7N.shape[1], device=device) // in_segment
    tile_NM = first + segment_N[:, None] * step + torch.arange(most, device=device)
    exists_NM = (tile_NM >= 0) & (tile_NM < count)
    tile_NM = tile_NM.clamp(0, count - 1)
    ours, theirs = Extent(*ours_7N[:, :, None]), Extent(*theirs_7N[:, tile_NM])
    queries, keys = (ours, theirs) if causal == 1 else (theirs, ours)
    live_NM = (
        exists_NM
        & (theirs.first_slot <= ours.last_slot + after)
        & (theirs.last_slot >= ours.first_slot - before)
        & (keys.first_token <= queries.last_token)
        & (keys.last_token >= queries.first_start)
    )
    whole_NM = (
        live_NM
        & (theirs.last_slot <= ours.first_slot + after)
        & (theirs.first_slot >= ours.last_slot - before)
        & (keys.last_token <= queries.first_token)
        & (keys.first_token >= queries.last_start)
        & (ours.filled == 1)
        & (theirs.filled == 1)
    )
    order_NM = (2 - live_NM.int() - whole_NM.int()).argsort(dim=1, stable=True)
    return (
        tile_NM.gather(1, order_NM).int(),
        live_NM.sum(1, dtype=torch.int32),
        whole_NM.sum(1, dtype=torch.int32),
    )
