"""One token on a GPU: rows of the cache are read where they lie, through their numbers."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.triton_tools import INTERPRETED, LOG2_E, product_dtype

ROWS, BLOCK = 256, 64
"""Rows of one program, and those that it takes at a time."""


def attend_rows(
    q_BHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    row_BW: Tensor,
    attended_BW: Tensor,
    own_logit_BH: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """[B, H, V] in v's dtype: attention over the rows of each sequence that are attended.

    Args:
        row_BW        int64; those that are not attended may lie anywhere.
        own_logit_BH  fp32: the logit of each sequence's last attended row, instead of q . k there.
        scale         of the other logits.
    Raises:
        ValueError: another dtype than bf16 or device than a GPU, widths that are no powers of two
            of at least 16, a cache whose rows are not contiguous.
    """
    (B, _, G, K), V, H = k_BSGK.shape, v_BSGV.shape[3], q_BHK.shape[1]
    if not INTERPRETED and (q_BHK.device.type != "cuda" or q_BHK.dtype != torch.bfloat16):
        raise ValueError(f"q_BHK is {q_BHK.dtype} on {q_BHK.device}: takes bf16 on a GPU")
    for name, width in (("K", K), ("V", V)):
        if width < 16 or width & (width - 1):
            raise ValueError(f"{name}={width}: takes powers of two from 16 on")
    for name, cache in (("k_BSGK", k_BSGK), ("v_BSGV", v_BSGV)):
        if not cache[0].is_contiguous():
            raise ValueError(f"{name}'s rows are not contiguous")
    W, shared = row_BW.shape[1], H // G
    heads, splits = max(16, triton.next_power_of_2(shared)), triton.cdiv(W, ROWS)
    top_BGNR, sum_BGNR = q_BHK.new_empty(2, B, G, splits, heads, dtype=torch.float32)
    o_BGNRV = q_BHK.new_empty(B, G, splits, heads, V, dtype=torch.float32)
    own_row_B = None
    if own_logit_BH is not None:
        own_row_B = row_BW.where(attended_BW, -1).amax(1)
    windowed_rows_kernel[(splits, B * G)](
        q_BHK.contiguous(), k_BSGK, v_BSGV, row_BW.contiguous(), attended_BW.contiguous(),
        own_row_B, own_logit_BH, top_BGNR, sum_BGNR, o_BGNRV,
        scale, W, k_BSGK.stride(0), v_BSGV.stride(0), G, shared,
        HEADS=heads, K=K, V=V, ROWS=ROWS, BLOCK=BLOCK, OWN=own_logit_BH is not None,
        PRODUCT=product_dtype(q_BHK.dtype), num_warps=4,
    )  # fmt: skip
    weight_BGNR = torch.exp2(top_BGNR - top_BGNR.amax(2, keepdim=True))
    o_BGRV = (weight_BGNR[..., None] * o_BGNRV).sum(2)
    o_BGRV = o_BGRV / (weight_BGNR * sum_BGNR).sum(2)[..., None]
    return o_BGRV[:, :, :shared].flatten(1, 2).to(v_BSGV.dtype)


@triton.jit(do_not_specialize=["W", "k_stride", "v_stride", "G", "shared"])
def windowed_rows_kernel(
    q_BHK, k_BSGK, v_BSGV, row_BW, attended_BW, own_row_B, own_logit_BH,
    top_BGNR, sum_BGNR, o_BGNRV, scale, W, k_stride, v_stride, G, shared,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OWN: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one sequence, attended by the query heads of one key/value head."""
    split = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    key_K, value_V = tl.arange(0, K), tl.arange(0, V)
    head_R = tl.arange(0, HEADS)
    used_R = head_R < shared
    h_R = bg * shared + head_R
    q_RK = tl.load(q_BHK + h_R[:, None] * K + key_K[None, :], used_R[:, None], 0.0).to(PRODUCT)
    top_R = tl.full([HEADS], -1e30, tl.float32)
    sum_R = tl.zeros([HEADS], tl.float32)
    o_RV = tl.zeros([HEADS, V], tl.float32)
    for first in range(split * ROWS, tl.minimum((split + 1) * ROWS, W), BLOCK):
        w_S = first + tl.arange(0, BLOCK)
        there_S = tl.load(attended_BW + b * W + w_S, w_S < W, 0) != 0
        row_S = tl.load(row_BW + b * W + w_S, w_S < W, 0)
        at_S = row_S * G + g
        k_tile = k_BSGK + b * k_stride + at_S[:, None] * K + key_K[None, :]
        v_tile = v_BSGV + b * v_stride + at_S[:, None] * V + value_V[None, :]
        k_SK = tl.load(k_tile, there_S[:, None], 0.0).to(PRODUCT)
        v_SV = tl.load(v_tile, there_S[:, None], 0.0).to(PRODUCT)
        logit_RS = tl.dot(q_RK, tl.trans(k_SK)) * scale
        if OWN:
            own_S = row_S == tl.load(own_row_B + b)
            own_R = tl.load(own_logit_BH + h_R, used_R, 0.0)
            logit_RS = tl.where(own_S[None, :], own_R[:, None], logit_RS)
        logit_RS = tl.where(there_S[None, :], logit_RS * LOG2_E, float("-inf"))
        larger_R = tl.maximum(top_R, tl.max(logit_RS, 1))
        weight_RS = tl.exp2(logit_RS - larger_R[:, None])
        shrink_R = tl.exp2(top_R - larger_R)
        sum_R = sum_R * shrink_R + tl.sum(weight_RS, 1)
        o_RV = tl.dot(weight_RS.to(PRODUCT), v_SV, o_RV * shrink_R[:, None])
        top_R = larger_R
    at_R = (bg * tl.num_programs(0) + split) * HEADS + head_R
    tl.store(top_BGNR + at_R, top_R)
    tl.store(sum_BGNR + at_R, sum_R)
    tl.store(o_BGNRV + at_R[:, None] * V + value_V[None, :], o_RV)
