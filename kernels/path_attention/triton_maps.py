"""Queries in versions that meet the keys of each earlier block, carried there map by map.

A sequence of L blocks with maps P_0 .. P_{L-1} has pairs t > b of blocks, those with t - b <= lags
alone, in the order (1, 0), (2, 0), (2, 1), ... The versions of block t are

    v_{t-1} = q,   v_{b-1} = v_b P_b

of which v_b meets the keys that are carried to the right edge of block b. The same serves the tiles
of a span, where v_{-1} is q at the span's left edge, and the spans of the whole.
"""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.triton_tools import INTERPRETED, tile

VARYING = ("M", "L", "P", "lags", "H", "G", "U")
"""Of which no value is worth a compilation of its own."""


def pair_row(t: int, lags: int) -> int:
    """The number of pairs of blocks before t: where its own begin."""
    return t * (t - 1) // 2 if t <= lags else lags * (lags + 1) // 2 + (t - lags - 1) * lags


class Versions(torch.autograd.Function):
    """Of every block of queries.

    Args:
        q_BHMLUK    [B, H, M, L, U, K] fp32: M sequences of L blocks of U rows.
        map_BGMLKK  [B, G, M, L, K, K] fp32.
        lags        of the pairs.
        dtype       of the versions.
        rows        that one program takes.
    Returns:
        [B, H, M, pairs, U, K] and, where all pairs are taken (lags >= L), v_{-1} like q; else None.
    """

    @staticmethod
    def forward(ctx, q_BHMLUK, map_BGMLKK, lags, dtype, rows):  # type: ignore[override]
        B, H, M, L, U, K = q_BHMLUK.shape
        P, to_start = pair_row(L, lags), lags >= L
        out = q_BHMLUK.new_empty(B, H, M, P, U, K, dtype=dtype)
        start = torch.empty_like(q_BHMLUK) if to_start else None
        version_kernel[(M * L * (U // rows), B * H)](
            q_BHMLUK, map_BGMLKK, out, start, M, L, P, lags, TO_START=to_start,
            **_launch(q_BHMLUK, map_BGMLKK, rows),
        )  # fmt: skip
        ctx.save_for_backward(map_BGMLKK, out)
        ctx.like, ctx.options = torch.empty_like(q_BHMLUK, device="meta"), (lags, rows)
        return out, start

    @staticmethod
    def backward(ctx, dout, dstart):  # type: ignore[override]
        """`dout` is overwritten."""
        map_BGMLKK, out = ctx.saved_tensors
        lags, rows = ctx.options
        B, H, M, L, U, _ = ctx.like.shape
        P, G, to_start = out.shape[3], map_BGMLKK.shape[1], lags >= L
        dq = torch.empty_like(ctx.like, device=map_BGMLKK.device)
        dmap, launch = torch.empty_like(map_BGMLKK), _launch(ctx.like, map_BGMLKK, rows)
        if to_start:
            dstart = dstart.contiguous()
        version_gradient_kernel[(M * L * (U // rows), B * H)](
            map_BGMLKK, dout, dstart, dq, M, L, P, lags, TO_START=to_start, **launch
        )
        version_map_kernel[(M * L, B * G)](
            out, dout, dmap, M, L, P, lags, TO_START=to_start, **launch
        )
        return dq, dmap, None, None, None


def _launch(q_BHMLUK: Tensor, map_BGMLKK: Tensor, rows: int) -> dict:
    H, U, K = q_BHMLUK.shape[1], q_BHMLUK.shape[4], q_BHMLUK.shape[5]
    low = tl.float32 if INTERPRETED else tl.bfloat16
    shape = {"H": H, "G": map_BGMLKK.shape[1], "U": U, "K": K, "C": rows, "LOW": low}
    return shape | {"num_warps": 8, "num_stages": 1}


@triton.jit
def row_of_pairs(t, lags):
    """`pair_row` on the device."""
    all_earlier = t * (t - 1) // 2
    return tl.where(t <= lags, all_earlier, lags * (lags + 1) // 2 + (t - lags - 1) * lags)


@triton.jit(do_not_specialize=VARYING)
def version_kernel(
    q, maps, out, start, M, L, P, lags,
    H, G, U, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, TO_START: tl.constexpr,
):  # fmt: skip
    """C rows of block t: in tf32, so that what is rounded to bf16 is rounded once."""
    part = tl.program_id(0) % (U // C)
    t = (tl.program_id(0) // (U // C)) % L
    m = tl.program_id(0) // (U // C) // L
    bh = tl.program_id(1).to(tl.int64)
    bg = bh // H * G + bh % H // (H // G)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    v_CK = tl.load(tile(q, ((bh * M + m) * L + t) * U + part * C, K, row_C, key_K))
    pair = (bh * M + m) * P + row_of_pairs(t + 1, lags)
    for i in range(tl.minimum(t, lags)):
        out_tile = tile(out, (pair - 1 - i) * U + part * C, K, row_C, key_K)
        tl.store(out_tile, v_CK.to(out.dtype.element_ty))
        if TO_START or i + 1 < tl.minimum(t, lags):
            map_KK = tl.load(tile(maps, ((bg * M + m) * L + t - 1 - i) * K, K, key_K, key_K))
            v_CK = tl.dot(v_CK, map_KK, input_precision="tf32")
    if TO_START:
        tl.store(tile(start, ((bh * M + m) * L + t) * U + part * C, K, row_C, key_K), v_CK)


@triton.jit(do_not_specialize=VARYING)
def version_gradient_kernel(
    maps, dout, dstart, dq, M, L, P, lags,
    H, G, U, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, TO_START: tl.constexpr,
):  # fmt: skip
    """The gradient dq of C rows of block t; that of v_{b-1} through later steps takes the place of
    version b's own in dout."""
    part = tl.program_id(0) % (U // C)
    t = (tl.program_id(0) // (U // C)) % L
    m = tl.program_id(0) // (U // C) // L
    bh = tl.program_id(1).to(tl.int64)
    bg = bh // H * G + bh % H // (H // G)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    own = tile(dq, ((bh * M + m) * L + t) * U + part * C, K, row_C, key_K)
    dv_CK = tl.zeros([C, K], tl.float32)
    if TO_START:
        dv_CK = tl.load(tile(dstart, ((bh * M + m) * L + t) * U + part * C, K, row_C, key_K))
    steps = tl.minimum(t, lags)
    pair = (bh * M + m) * P + row_of_pairs(t, lags)
    for i in range(steps):
        dout_tile = tile(dout, (pair + i) * U + part * C, K, row_C, key_K)
        dout_CK = tl.load(dout_tile).to(tl.float32)
        tl.store(dout_tile, dv_CK.to(dout.dtype.element_ty))
        map_KK = tl.load(tile(maps, ((bg * M + m) * L + t - steps + i) * K, K, key_K, key_K))
        dv_CK = tl.dot(dv_CK.to(LOW), tl.trans(map_KK.to(LOW)), dout_CK)
    tl.store(own, dv_CK)


@triton.jit(do_not_specialize=VARYING)
def version_map_kernel(
    out, dout, dmap, M, L, P, lags,
    H, G, U, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, TO_START: tl.constexpr,
):  # fmt: skip
    """dP_b = sum over t > b of v_b^T dv_{b-1}, over all rows and the query heads that share it."""
    b = tl.program_id(0) % L
    m = tl.program_id(0) // L
    bg = tl.program_id(1).to(tl.int64)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    dmap_KK = tl.zeros([K, K], tl.float32)
    for t in range(b + 1, tl.minimum(L, b + lags + 1)):
        in_row = row_of_pairs(t + 1, lags) - t + b
        for i in range((H // G) * (U // C)):
            bh = bg // G * H + bg % G * (H // G) + i // (U // C)
            first = ((bh * M + m) * P + in_row) * U + i % (U // C) * C
            v_CK = tl.load(tile(out, first, K, row_C, key_K)).to(LOW)
            dv_CK = tl.load(tile(dout, first, K, row_C, key_K)).to(LOW)
            dmap_KK = tl.dot(tl.trans(v_CK), dv_CK, dmap_KK)
    tl.store(tile(dmap, ((bg * M + m) * L + b) * K, K, key_K, key_K), dmap_KK)
