"""The plan on a GPU, each part in one launch: the keys of the permutation, tiles, tile lists.

The same integers as permutation.py and plan.py compute in torch, which takes hundreds of launches.
"""

# Launches take tensors and constants that the kernels' signatures do not name.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.triton_tools import INTERPRETED

KEYS = 1024
NOTHING = tl.constexpr(2**31 - 1)
"""Of plan.py."""


def random_keys(
    start_T: Tensor, end_T: Tensor, seed: int, step: int | Tensor, layers: range
) -> Tensor:
    """[L, T] int64: two words of Philox-4x32-10 for each token, as permutation.py has them."""
    if not (start_T.is_cuda or INTERPRETED):
        raise ValueError(f"cu_seqlens is on {start_T.device}: backend='triton' plans on a GPU")
    T = len(start_T)
    key_LT = start_T.new_empty(len(layers), T)
    on_device = isinstance(step, Tensor)
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, 0 if on_device else step, layers.start]
    # As signed 32-bit numbers, so that a large one is not another type.
    low, high, number, layer = (w - (1 << 32) if w >= 1 << 31 else w for w in words)
    step = step if on_device else number
    options = {"C": KEYS, "STEP_ON_DEVICE": on_device}
    grid = (triton.cdiv(T, KEYS), len(layers))
    windowed_keys_kernel[grid](start_T, end_T, key_LT, low, high, step, layer, T, **options)
    return key_LT


@triton.jit(do_not_specialize=["seed_low", "seed_high", "step", "first_layer", "T"])
def windowed_keys_kernel(
    start_T,
    end_T,
    key_LT,
    seed_low,
    seed_high,
    step,
    first_layer,
    T,
    C: tl.constexpr,
    STEP_ON_DEVICE: tl.constexpr,
):
    if STEP_ON_DEVICE:
        step = tl.load(step)
    t_C = tl.program_id(0) * C + tl.arange(0, C)
    start_C = tl.load(start_T + t_C, t_C < T, 0)
    c0 = (t_C - start_C).to(tl.uint32)
    c1 = (tl.load(end_T + t_C, t_C < T, 0) - start_C).to(tl.uint32)
    c2 = tl.zeros([C], tl.uint32) + step.to(tl.uint32)
    c3 = tl.zeros([C], tl.uint32) + (first_layer + tl.program_id(1)).to(tl.uint32)
    k0, k1 = seed_low.to(tl.uint32).to(tl.uint64), seed_high.to(tl.uint32).to(tl.uint64)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1.to(tl.uint32)
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    key_C = (c1.to(tl.uint64) << 32) | c0.to(tl.uint64)
    key_T = key_LT + tl.program_id(1).to(tl.int64) * T
    tl.store(key_T + t_C, key_C.to(tl.int64, bitcast=True), t_C < T)


def tiles(
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
    """Row, slot, token and document start [4, N, C] int32 in the order of tiles, and the tiles'
    extents [7, N] int32. Without row_S a slot's row is its token."""
    if not (token_S.is_cuda or INTERPRETED):
        raise ValueError(f"order_T is on {token_S.device}: backend='triton' plans on a GPU")
    slots = len(token_S)
    segments = triton.cdiv(slots, segment)
    N = segments * (segment // tile)
    values_4NC = torch.empty(4, N, tile, dtype=torch.int32, device=token_S.device)
    extent_7N = torch.empty(7, N, dtype=torch.int32, device=token_S.device)
    windowed_tiles_kernel[(segments,)](
        row_S,
        token_S,
        start_S,
        values_4NC,
        extent_7N,
        rows,
        tokens,
        first_slot,
        slots,
        N,
        SEGMENT=segment,
        C=tile,
        HAS_ROWS=row_S is not None,
    )
    return values_4NC, extent_7N


@triton.jit(do_not_specialize=["rows", "tokens", "first_slot", "slots", "N"])
def windowed_tiles_kernel(
    row_S,
    token_S,
    start_S,
    values_4NC,
    extent_7N,
    rows,
    tokens,
    first_slot,
    slots,
    N,
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    first = tl.program_id(0) * SEGMENT
    local = tl.arange(0, SEGMENT)
    inside = first + local < slots
    token = tl.load(token_S + first + local, inside, 0)
    token = tl.where(inside & (token < tokens), token, NOTHING)
    by_token = tl.sort((token << 16) | local)
    token = (by_token >> 16).to(tl.int32)
    source = first + (by_token & 0xFFFF).to(tl.int32)
    there = token < NOTHING
    start = tl.load(start_S + source, there, NOTHING).to(tl.int32)
    if HAS_ROWS:
        row = tl.load(row_S + source, there, rows).to(tl.int32)
    else:
        row = tl.where(there, token, rows)
    slot = source + first_slot
    plane = N * C
    out = values_4NC + first + local
    tl.store(out, row)
    tl.store(out + plane, slot)
    tl.store(out + 2 * plane, token)
    tl.store(out + 3 * plane, start)
    in_segment: tl.constexpr = SEGMENT // C
    token = tl.reshape(token, (in_segment, C))
    start, slot = tl.reshape(start, (in_segment, C)), tl.reshape(slot, (in_segment, C))
    there = token < NOTHING
    extent = extent_7N + tl.program_id(0) * in_segment + tl.arange(0, in_segment)
    tl.store(extent, tl.min(slot, 1))
    tl.store(extent + N, tl.max(slot, 1))
    tl.store(extent + 2 * N, tl.min(token, 1))
    tl.store(extent + 3 * N, tl.max(tl.where(there, token, -1), 1))
    tl.store(extent + 4 * N, tl.min(start, 1))
    tl.store(extent + 5 * N, tl.max(tl.where(there, start, -1), 1))
    tl.store(extent + 6 * N, tl.min(there.to(tl.int32), 1))


def tile_lists(
    ours_7N: Tensor,
    theirs_7N: Tensor,
    near: tuple[int, int, int],
    most: int,
    before: int,
    after: int,
    *,
    causal: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """tiles_NM, count_N and whole_N of `TileLists`. The M = most tiles near the n-th of ours
    start with first + n // in_segment * step, for near = (first, in_segment, step); some may not
    exist."""
    first, in_segment, step = near
    N, others = ours_7N.shape[1], theirs_7N.shape[1]
    tiles_NM = torch.empty(N, most, dtype=torch.int32, device=ours_7N.device)
    count_N, whole_N = torch.empty(2, N, dtype=torch.int32, device=ours_7N.device)
    windowed_lists_kernel[(N,)](
        ours_7N,
        theirs_7N,
        tiles_NM,
        count_N,
        whole_N,
        first,
        in_segment,
        step,
        most,
        before,
        after,
        others,
        CAUSAL=causal == 1,
        M=triton.next_power_of_2(most),
    )
    return tiles_NM, count_N, whole_N


@triton.jit(
    do_not_specialize=["first", "in_segment", "step", "most", "before", "after", "others"]
)  # fmt: skip
def windowed_lists_kernel(
    ours_7N,
    theirs_7N,
    tiles_NM,
    count_N,
    whole_N,
    first,
    in_segment,
    step,
    most,
    before,
    after,
    others,
    CAUSAL: tl.constexpr,
    M: tl.constexpr,
):
    n = tl.program_id(0)
    N = tl.num_programs(0)
    m = tl.arange(0, M)
    tile = first + n // in_segment * step + m
    listed = m < most
    live = listed & (tile >= 0) & (tile < others)
    tile = tl.minimum(tl.maximum(tile, 0), others - 1)
    # First and last slot, token and document start; whether no slot is empty.
    slot0, slot1 = tl.load(ours_7N + n), tl.load(ours_7N + N + n)
    slots0, slots1 = tl.load(theirs_7N + tile), tl.load(theirs_7N + others + tile)
    if CAUSAL:
        q_tile, q_7N, q_count, k_tile, k_7N, k_count = n, ours_7N, N, tile, theirs_7N, others
    else:
        q_tile, q_7N, q_count, k_tile, k_7N, k_count = tile, theirs_7N, others, n, ours_7N, N
    q_token0 = tl.load(q_7N + 2 * q_count + q_tile)
    q_token1 = tl.load(q_7N + 3 * q_count + q_tile)
    q_start0 = tl.load(q_7N + 4 * q_count + q_tile)
    q_start1 = tl.load(q_7N + 5 * q_count + q_tile)
    k_token0 = tl.load(k_7N + 2 * k_count + k_tile)
    k_token1 = tl.load(k_7N + 3 * k_count + k_tile)
    live = live & (slots0 <= slot1 + after) & (slots1 >= slot0 - before)
    live = live & (k_token0 <= q_token1) & (k_token1 >= q_start0)
    whole = live & (slots1 <= slot0 + after) & (slots0 >= slot1 - before)
    whole = whole & (k_token1 <= q_token0) & (k_token0 >= q_start1)
    whole = whole & (tl.load(ours_7N + 6 * N + n) == 1)
    whole = whole & (tl.load(theirs_7N + 6 * others + tile) == 1)
    # Whole ones first, then the others that live, then what nobody reads.
    is_whole, is_part = whole.to(tl.int32), (live & ~whole).to(tl.int32)
    is_dead = (listed & ~live).to(tl.int32)
    wholes, parts = tl.sum(is_whole, 0), tl.sum(is_part, 0)
    place = tl.where(live, wholes + tl.cumsum(is_part, 0), wholes + parts + tl.cumsum(is_dead, 0))
    place = tl.where(whole, tl.cumsum(is_whole, 0), place) - 1
    tl.store(tiles_NM + n.to(tl.int64) * most + place, tile, listed)
    tl.store(count_N + n, wholes + parts)
    tl.store(whole_N + n, wholes)
