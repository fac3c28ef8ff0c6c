"""One token on a GPU: the cached keys are carried on in place while they are attended."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.path_attention.triton_forward import LOG2_E

ROWS, BLOCK = 256, 32
"""Cached tokens of one program, and those it takes at a time."""


def path_attention_step_triton(
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    gate_BSH: Tensor | None,
    length_B: Tensor,
    q_BHK: Tensor,
    k_BGK: Tensor,
    v_BGV: Tensor,
    w_BGK: Tensor | None,
    beta_BG: Tensor | None,
    log_forget_BH: Tensor | None,
    *,
    scale: float,
    gate_scale: float,
) -> Tensor:
    """Arguments and result of `path_attention_step`, for K and V powers of 2 of at least 16. The
    keys are read and written once.

    Raises:
        ValueError: a cache whose rows are not contiguous.
    """
    (B, S, G, K), V, H = k_BSGK.shape, v_BSGV.shape[3], q_BHK.shape[1]
    rows = []
    for name, cache in (("k_BSGK", k_BSGK), ("v_BSGV", v_BSGV), ("gate_BSH", gate_BSH)):
        if cache is not None and not cache[0].is_contiguous():
            raise ValueError(f"{name}'s rows are not contiguous: the triton form writes them")
        # A cache may have room behind the S tokens.
        rows.append(0 if cache is None else cache.stride(0) // cache[0, 0].numel())
    shared = H // G
    heads = max(16, triton.next_power_of_2(shared))
    splits = triton.cdiv(S, ROWS)
    tops, sums = q_BHK.new_empty(2, B, G, splits, heads, dtype=torch.float32)
    parts = q_BHK.new_empty(B, G, splits, heads, V, dtype=torch.float32)
    new = (None if x is None else x.contiguous() for x in (w_BGK, beta_BG, log_forget_BH))
    path_step_kernel[(splits, B * G)](
        k_BSGK, v_BSGV, gate_BSH, length_B, q_BHK.contiguous(), k_BGK.contiguous(),
        v_BGV.contiguous(), *new, tops, sums, parts, scale, gate_scale, *rows, G, shared,
        HEADS=heads, K=K, V=V, ROWS=ROWS, BLOCK=BLOCK,
        MAPS=w_BGK is not None, GATE=gate_BSH is not None, num_warps=4,
    )  # fmt: skip
    weights = torch.exp2(tops - tops.amax(2, keepdim=True))
    o_BGRV = (weights[..., None] * parts).sum(2) / (weights * sums).sum(2)[..., None]
    return o_BGRV[:, :, :shared].flatten(1, 2).to(v_BGV.dtype)


@triton.jit(do_not_specialize=("k_rows", "v_rows", "gate_rows", "G", "shared"))
def path_step_kernel(
    k, v, gate, length_B, q, new_k, new_v, w, beta, log_forget, tops, sums, parts,
    scale, gate_scale, k_rows, v_rows, gate_rows, G, shared,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, MAPS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """ROWS cached tokens of one key/value head: carried on, and attended by its query heads."""
    split = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b = bg // G
    key_K, value_V = tl.arange(0, K), tl.arange(0, V)
    row_R, column = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    used_R = row_R < shared
    h_R = bg * shared + row_R
    length = tl.load(length_B + b).to(tl.int32)
    q_RK = tl.load(q + h_R[:, None] * K + key_K[None, :], used_R[:, None], 0.0).to(tl.float32)
    k_K = tl.load(new_k + bg * K + key_K).to(tl.float32)
    v_V = tl.load(new_v + bg * V + value_V).to(tl.float32)
    top_R = tl.full([HEADS], -1e30, tl.float32)
    sum_R = tl.zeros([HEADS], tl.float32)
    acc_RV = tl.zeros([HEADS, V], tl.float32)
    rows = tl.minimum(ROWS, length + 1 - split * ROWS)
    for i in range(tl.cdiv(tl.maximum(rows, 0), BLOCK)):
        u_B = split * ROWS + i * BLOCK + column
        cached_B1, new_B1 = (u_B < length)[:, None], (u_B == length)[:, None]
        k_tile = k + ((b * k_rows + u_B) * G + bg % G)[:, None] * K + key_K[None, :]
        k_BK = tl.load(k_tile, cached_B1, 0.0).to(tl.float32)
        written_B1 = new_B1
        if MAPS:
            w_K = tl.load(w + bg * K + key_K).to(tl.float32)
            along_B = tl.sum(k_BK * w_K[None, :], 1) * tl.load(beta + bg).to(tl.float32)
            k_BK -= along_B[:, None] * w_K[None, :]
            written_B1 = new_B1 | cached_B1
        k_BK = tl.where(new_B1, k_K[None, :], k_BK)
        tl.store(k_tile, k_BK.to(k.dtype.element_ty), written_B1)
        v_tile = v + ((b * v_rows + u_B) * G + bg % G)[:, None] * V + value_V[None, :]
        v_BV = tl.load(v_tile, cached_B1, 0.0).to(tl.float32)
        v_BV = tl.where(new_B1, v_V[None, :], v_BV)
        tl.store(v_tile, v_BV.to(v.dtype.element_ty), new_B1)
        s_RB = tl.dot(q_RK, tl.trans(k_BK), input_precision="ieee") * (scale * LOG2_E)
        if GATE:
            # [B, S, H]: the heads of a key/value head lie side by side.
            gate_at_B = ((b * gate_rows + u_B) * G + bg % G) * shared
            gate_tile = gate + gate_at_B[None, :] + row_R[:, None]
            cached_RB = used_R[:, None] & (u_B < length)[None, :]
            gate_RB = tl.load(gate_tile, cached_RB, 0.0).to(tl.float32)
            gate_RB += tl.load(log_forget + h_R, used_R, 0.0).to(tl.float32)[:, None]
            gate_RB = tl.where((u_B == length)[None, :], 0.0, gate_RB)
            written_RB = used_R[:, None] & (u_B <= length)[None, :]
            tl.store(gate_tile, gate_RB.to(gate.dtype.element_ty), written_RB)
            s_RB += gate_RB * (gate_scale * LOG2_E)
        s_RB = tl.where((u_B <= length)[None, :], s_RB, float("-inf"))
        new_R = tl.maximum(top_R, tl.max(s_RB, 1))
        p_RB = tl.exp2(s_RB - new_R[:, None])
        shrink_R = tl.exp2(top_R - new_R)
        sum_R = sum_R * shrink_R + tl.sum(p_RB, 1)
        acc_RV = acc_RV * shrink_R[:, None] + tl.dot(p_RB, v_BV, input_precision="ieee")
        top_R = new_R
    at_R = (bg * tl.num_programs(0) + split) * HEADS + row_R
    tl.store(tops + at_R, top_R)
    tl.store(sums + at_R, sum_R)
    tl.store(parts + at_R[:, None] * V + value_V[None, :], acc_RV)
