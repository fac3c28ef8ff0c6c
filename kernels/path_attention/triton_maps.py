"""What carries queries over several blocks at once: products of maps, and the versions of a block
of queries that meet the keys of each earlier block.

A sequence of L blocks with maps P_0 .. P_{L-1} has pairs t > b of blocks, those with t - b <= lags
alone, in the order (1, 0), (2, 0), (2, 1), ... `Products` gives for t = 1 .. L

    R_tb = P_{t-1} ... P_{b+1}

The same serves the tiles of a span and the spans of the whole.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.triton_tools import INTERPRETED, tile

VARYING = ("M", "L", "P", "products", "lags", "H", "G", "U")
"""Of which no value is worth a compilation of its own."""


def pair_row(t: int, lags: int) -> int:
    """The number of pairs of blocks before t: where its own begin."""
    return t * (t - 1) // 2 if t <= lags else lags * (lags + 1) // 2 + (t - lags - 1) * lags


class Products(torch.autograd.Function):
    """[..., L, K, K] maps to [..., pairs of 0 .. L, K, K] products R_tb, t = 1 .. L."""

    @staticmethod
    def forward(ctx, map_xLKK, lags):  # type: ignore[override]
        L, K = map_xLKK.shape[-3:-1]
        R = map_xLKK.new_empty(*map_xLKK.shape[:-3], pair_row(L + 1, lags), K, K)
        identity_KK = torch.eye(K, dtype=R.dtype, device=R.device)
        for t in range(1, L + 1 if lags else 0):
            row = R[..., pair_row(t, lags) : pair_row(t + 1, lags), :, :]
            row[..., -1, :, :] = identity_KK
            carried = row.shape[-3] - 1
            if carried:
                before = R[..., pair_row(t, lags) - carried : pair_row(t, lags), :, :]
                row[..., :carried, :, :] = map_xLKK[..., t - 1, None, :, :] @ before
        ctx.save_for_backward(map_xLKK, R)
        ctx.lags = lags
        return R

    @staticmethod
    def backward(ctx, dR):  # type: ignore[override]
        map_xLKK, R = ctx.saved_tensors
        dmap_xLKK = torch.zeros_like(map_xLKK)
        above = None
        for t in range(map_xLKK.shape[-3] if ctx.lags else 0, 0, -1):
            row = slice(pair_row(t, ctx.lags), pair_row(t + 1, ctx.lags))
            own = dR[..., row, :, :].clone()
            if above is not None and above.shape[-3] > 1:
                # R_{t+1,b} = P_t R_tb for all but the last b of row t + 1.
                above = above[..., :-1, :, :]
                kept = above.shape[-3]
                R_row = R[..., row, :, :][..., -kept:, :, :]
                dmap_xLKK[..., t, :, :] = (above @ R_row.mT).sum(-3)
                own[..., -kept:, :, :] += map_xLKK[..., t, None, :, :].mT @ above
            above = own
        return dmap_xLKK, None


@lru_cache(maxsize=64)
def pairs_of(blocks: int, lags: int, padded: bool, device: torch.device) -> Tensor:
    """[3, pairs] int32: t, b, and where R_tb stands. `padded`: the products are of the maps with an
    identity in front, so that they also carry queries to the left edge (b = -1)."""
    pairs = [(t, b) for t in range(blocks) for b in range(max(0, t - lags), t)]
    at = [t * (t + 1) // 2 + b + 1 if padded else p for p, (t, b) in enumerate(pairs)]
    triples = [(t, b, r) for (t, b), r in zip(pairs, at, strict=True)]
    return torch.tensor(triples, dtype=torch.int32).reshape(-1, 3).T.contiguous().to(device)


class Versions(torch.autograd.Function):
    """q R_tb of every block t of queries for blocks b before it.

    Args:
        q_BHMLUK  [B, H, M, L, U, K] fp32: M sequences of L blocks of U rows.
        R_BGMPKK  [B, G, M, products, K, K] fp32.
        lags      of the pairs; with `padded` all of them.
        dtype     of the result [B, H, M, pairs, U, K].
        rows      that one program takes.
    """

    @staticmethod
    def forward(ctx, q_BHMLUK, R_BGMPKK, lags, padded, dtype, rows):  # type: ignore[override]
        B, H, M, L, U, K = q_BHMLUK.shape
        pairs_3P = pairs_of(L, lags, padded, q_BHMLUK.device)
        P = pairs_3P.shape[1]
        out = q_BHMLUK.new_empty(B, H, M, P, U, K, dtype=dtype)
        if P:
            version_kernel[(M * P * (U // rows), B * H)](
                q_BHMLUK, R_BGMPKK, pairs_3P, out, M, L, P, R_BGMPKK.shape[3],
                **_shape(q_BHMLUK, R_BGMPKK, rows), num_warps=8, num_stages=1,
            )  # fmt: skip
        ctx.save_for_backward(q_BHMLUK, R_BGMPKK)
        ctx.options = lags, padded, rows
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        q_BHMLUK, R_BGMPKK = ctx.saved_tensors
        lags, padded, rows = ctx.options
        B, H, M, L, U, _ = q_BHMLUK.shape
        pairs_3P = pairs_of(L, lags, padded, q_BHMLUK.device)
        G, P, products = R_BGMPKK.shape[1], pairs_3P.shape[1], R_BGMPKK.shape[3]
        dq, dR = torch.zeros_like(q_BHMLUK), torch.zeros_like(R_BGMPKK)
        if P:
            dout, shape = dout.contiguous(), _shape(q_BHMLUK, R_BGMPKK, rows)
            version_query_kernel[(M * L * (U // rows), B * H)](
                dout, R_BGMPKK, dq, M, L, P, products, lags, PADDED=padded,
                **shape, num_warps=8, num_stages=1,
            )  # fmt: skip
            version_map_kernel[(M * P, B * G)](
                q_BHMLUK, dout, pairs_3P, dR, M, L, P, products, **shape, num_warps=8, num_stages=1
            )
        return dq, dR, None, None, None, None


def _shape(q_BHMLUK: Tensor, R_BGMPKK: Tensor, rows: int) -> dict:
    H, U, K = q_BHMLUK.shape[1], q_BHMLUK.shape[4], q_BHMLUK.shape[5]
    low = tl.float32 if INTERPRETED else tl.bfloat16
    return {"H": H, "G": R_BGMPKK.shape[1], "U": U, "K": K, "C": rows, "LOW": low}


@triton.jit
def row_of_pairs(t, lags):
    """`pair_row` on the device."""
    all_earlier = t * (t - 1) // 2
    return tl.where(t <= lags, all_earlier, lags * (lags + 1) // 2 + (t - lags - 1) * lags)


@triton.jit(do_not_specialize=VARYING)
def version_kernel(
    q, R, pairs_3P, out, M, L, P, products,
    H, G, U, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """C rows of one pair: in tf32, so that what is rounded to bf16 is rounded once."""
    part = tl.program_id(0) % (U // C)
    p = (tl.program_id(0) // (U // C)) % P
    m = tl.program_id(0) // (U // C) // P
    bh = tl.program_id(1).to(tl.int64)
    bg = bh // H * G + bh % H // (H // G)
    t = tl.load(pairs_3P + p)
    at = tl.load(pairs_3P + 2 * P + p)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    q_CK = tl.load(tile(q, ((bh * M + m) * L + t) * U + part * C, K, row_C, key_K))
    R_KK = tl.load(tile(R, ((bg * M + m) * products + at) * K, K, key_K, key_K))
    out_CK = tl.dot(q_CK, R_KK, input_precision="tf32")
    out_tile = tile(out, ((bh * M + m) * P + p) * U + part * C, K, row_C, key_K)
    tl.store(out_tile, out_CK.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=VARYING)
def version_query_kernel(
    dout, R, dq, M, L, P, products, lags,
    H, G, U, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """dq = sum over b of dout_tb R_tb^T, for C rows of block t."""
    part = tl.program_id(0) % (U // C)
    t = (tl.program_id(0) // (U // C)) % L
    m = tl.program_id(0) // (U // C) // L
    bh = tl.program_id(1).to(tl.int64)
    bg = bh // H * G + bh % H // (H // G)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    dq_CK = tl.zeros([C, K], tl.float32)
    for i in range(tl.minimum(t, lags)):
        p = row_of_pairs(t, lags) + i
        at = p
        if PADDED:
            at = t * (t + 1) // 2 + i + 1
        pair = (bh * M + m) * P + p
        dout_CK = tl.load(tile(dout, pair * U + part * C, K, row_C, key_K)).to(LOW)
        R_KK = tl.load(tile(R, ((bg * M + m) * products + at) * K, K, key_K, key_K))
        dq_CK = tl.dot(dout_CK, tl.trans(R_KK.to(LOW)), dq_CK)
    tl.store(tile(dq, ((bh * M + m) * L + t) * U + part * C, K, row_C, key_K), dq_CK)


@triton.jit(do_not_specialize=VARYING)
def version_map_kernel(
    q, dout, pairs_3P, dR, M, L, P, products,
    H, G, U, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """dR_tb = q_t^T dout_tb over all rows and the query heads that share the map."""
    p = tl.program_id(0) % P
    m = tl.program_id(0) // P
    bg = tl.program_id(1).to(tl.int64)
    t = tl.load(pairs_3P + p)
    at = tl.load(pairs_3P + 2 * P + p)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    dR_KK = tl.zeros([K, K], tl.float32)
    for i in range((H // G) * (U // C)):
        bh = bg // G * H + bg % G * (H // G) + i // (U // C)
        first = i % (U // C) * C
        q_CK = tl.load(tile(q, ((bh * M + m) * L + t) * U + first, K, row_C, key_K)).to(LOW)
        dout_CK = tl.load(tile(dout, ((bh * M + m) * P + p) * U + first, K, row_C, key_K))
        dR_KK = tl.dot(tl.trans(q_CK), dout_CK.to(LOW), dR_KK)
    tl.store(tile(dR, ((bg * M + m) * products + at) * K, K, key_K, key_K), dR_KK)
