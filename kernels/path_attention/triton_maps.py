"""What carries queries over several blocks at once: products of maps, and the versions of a block
of queries that meet the keys of each earlier block.

A sequence of L blocks with maps P_0 .. P_{L-1} has L (L - 1) / 2 pairs t > b, in the order (1, 0),
(2, 0), (2, 1), ...: pair (t, b) is number t (t - 1) / 2 + b. `Products` gives for t = 1 .. L

    R_tb = P_{t-1} ... P_{b+1}

The same serves the tiles of a span and the spans of the whole.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.triton_tools import INTERPRETED, tile

VARYING = ("M", "L", "P", "products", "H", "G", "U")
"""Of which no value is worth a compilation of its own."""


class Products(torch.autograd.Function):
    """[..., L, K, K] maps to [..., L (L + 1) / 2, K, K] products R_tb, t = 1 .. L."""

    @staticmethod
    def forward(ctx, map_xLKK):  # type: ignore[override]
        L, K = map_xLKK.shape[-3:-1]
        R = map_xLKK.new_empty(*map_xLKK.shape[:-3], L * (L + 1) // 2, K, K)
        identity_KK = torch.eye(K, dtype=R.dtype, device=R.device)
        for t in range(1, L + 1):
            row = R[..., t * (t - 1) // 2 :, :, :]
            row[..., t - 1, :, :] = identity_KK
            if t > 1:
                before = R[..., (t - 1) * (t - 2) // 2 : t * (t - 1) // 2, :, :]
                row[..., : t - 1, :, :] = map_xLKK[..., t - 1, None, :, :] @ before
        ctx.save_for_backward(map_xLKK, R)
        return R

    @staticmethod
    def backward(ctx, dR):  # type: ignore[override]
        map_xLKK, R = ctx.saved_tensors
        dmap_xLKK = torch.zeros_like(map_xLKK)
        above = None
        for t in range(map_xLKK.shape[-3], 0, -1):
            row = slice(t * (t - 1) // 2, t * (t + 1) // 2)
            own = dR[..., row, :, :]
            if above is not None:
                # R_{t+1,b} = P_t R_tb
                above = above[..., :t, :, :]
                dmap_xLKK[..., t, :, :] = (above @ R[..., row, :, :].mT).sum(-3)
                own = own + map_xLKK[..., t, None, :, :].mT @ above
            above = own
        return dmap_xLKK


def pairs_of(blocks: int, padded: bool, device: torch.device) -> Tensor:
    """[3, pairs] int32: t, b, and where R_tb stands. `padded`: the products are of the maps with an
    identity in front, so that they also carry queries to the left edge (b = -1)."""
    t_P, b_P = torch.tril_indices(blocks, blocks, -1, device=device)
    at_P = t_P * (t_P + 1) // 2 + b_P + 1 if padded else t_P * (t_P - 1) // 2 + b_P
    return torch.stack([t_P, b_P, at_P]).int()


class Versions(torch.autograd.Function):
    """q R_tb of every block t of queries for every block b before it.

    Args:
        q_BHMLUK  [B, H, M, L, U, K] fp32: M sequences of L blocks of U rows.
        R_BGMPKK  [B, G, M, products, K, K] fp32.
        dtype     of the result [B, H, M, L (L - 1) / 2, U, K].
    """

    @staticmethod
    def forward(ctx, q_BHMLUK, R_BGMPKK, padded, dtype, rows):  # type: ignore[override]
        B, H, M, L, U, K = q_BHMLUK.shape
        pairs_3P = pairs_of(L, padded, q_BHMLUK.device)
        P = pairs_3P.shape[1]
        out = q_BHMLUK.new_empty(B, H, M, P, U, K, dtype=dtype)
        if P:
            version_kernel[(M * P * (U // rows), B * H)](
                q_BHMLUK, R_BGMPKK, pairs_3P, out, M, L, P, R_BGMPKK.shape[3],
                **_shape(q_BHMLUK, R_BGMPKK, rows), num_warps=8, num_stages=1,
            )  # fmt: skip
        ctx.save_for_backward(q_BHMLUK, R_BGMPKK, pairs_3P)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        q_BHMLUK, R_BGMPKK, pairs_3P = ctx.saved_tensors
        B, H, M, L, U, _ = q_BHMLUK.shape
        G, P, products = R_BGMPKK.shape[1], pairs_3P.shape[1], R_BGMPKK.shape[3]
        dq, dR = torch.zeros_like(q_BHMLUK), torch.zeros_like(R_BGMPKK)
        if P:
            dout, shape = dout.contiguous(), _shape(q_BHMLUK, R_BGMPKK, ctx.rows)
            at_LL = pairs_3P.new_zeros(L, L)
            at_LL[pairs_3P[0].long(), pairs_3P[1].long()] = pairs_3P[2]
            version_query_kernel[(M * L * (U // ctx.rows), B * H)](
                dout, R_BGMPKK, at_LL, dq, M, L, P, products, **shape, num_warps=8, num_stages=1
            )
            version_map_kernel[(M * P, B * G)](
                q_BHMLUK, dout, pairs_3P, dR, M, L, P, products, **shape, num_warps=8, num_stages=1
            )
        return dq, dR, None, None, None


def _shape(q_BHMLUK: Tensor, R_BGMPKK: Tensor, rows: int) -> dict:
    H, U, K = q_BHMLUK.shape[1], q_BHMLUK.shape[4], q_BHMLUK.shape[5]
    low = tl.float32 if INTERPRETED else tl.bfloat16
    return {"H": H, "G": R_BGMPKK.shape[1], "U": U, "K": K, "C": rows, "LOW": low}


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
    dout, R, at_LL, dq, M, L, P, products,
    H, G, U, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """dq = sum over b of dout_tb R_tb^T, for C rows of block t."""
    part = tl.program_id(0) % (U // C)
    t = (tl.program_id(0) // (U // C)) % L
    m = tl.program_id(0) // (U // C) // L
    bh = tl.program_id(1).to(tl.int64)
    bg = bh // H * G + bh % H // (H // G)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    dq_CK = tl.zeros([C, K], tl.float32)
    for b in range(t):
        at = tl.load(at_LL + t * L + b)
        pair = (bh * M + m) * P + t * (t - 1) // 2 + b
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
