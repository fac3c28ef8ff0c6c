"""Gated linear attention with one decay a head, backward on a GPU: the gradients of a chunk, from
the state before it and the gradient of the state after it. The equations are in README.md.
"""

import triton
import triton.language as tl

from mixtron.kernels.gated_linear_attention.triton_forward import chunk_gates, chunk_rows
from mixtron.kernels.triton_tools import tile


@triton.jit(do_not_specialize=["T"])
def gla_query_kernel(
    q_BTHK,
    k_BTHK,
    v_BTJV,
    do_BTJV,
    log_decay_BTJ,
    document_T,
    states_BJNKV,
    dq_BTJK,
    dG_BTJ,
    scale,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """dq of one chunk and value head, and the queries' part of dG, in fp32."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first = b * T + n * C
    q_CK = chunk_rows(q_BTHK, bj, n, T, row_C, H, J, K, PRODUCT)
    k_CK = chunk_rows(k_BTHK, bj, n, T, row_C, H, J, K, PRODUCT)
    v_CV = chunk_rows(v_BTJV, bj, n, T, row_C, J, J, V, PRODUCT)
    do_CV = chunk_rows(do_BTJV, bj, n, T, row_C, J, J, V, PRODUCT)
    S_KV = tl.load(tile(states_BJNKV, (bj * N + n) * K, V, key_K, value_V)).to(PRODUCT)
    upto_CC, G_C, from_start_C, _, _ = chunk_gates(
        log_decay_BTJ, document_T, bj, n, T, row_C, J, HAS_DOCUMENTS
    )
    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf"))) * scale
    dP_CC = tl.dot(do_CV, tl.trans(v_CV)) * decay_CC
    dG_C = tl.sum(dP_CC * tl.dot(q_CK, tl.trans(k_CK)), 1)
    dq_CK = tl.dot(do_CV, tl.trans(S_KV)) * (from_start_C * scale)[:, None]
    dG_C += tl.sum(dq_CK * q_CK.to(tl.float32), 1)
    dq_CK = tl.dot(dP_CC.to(PRODUCT), k_CK, dq_CK)
    dq_tile = tile(dq_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dq_tile, dq_CK.to(dq_BTJK.dtype.element_ty), inside_C1)
    tl.store(dG_BTJ + (b * T + t_C) * J + j, dG_C, t_C < T)


@triton.jit(do_not_specialize=["T"])
def gla_key_kernel(
    q_BTHK,
    k_BTHK,
    v_BTJV,
    do_BTJV,
    log_decay_BTJ,
    document_T,
    states_BJNKV,
    dstates_BJNKV,
    dk_BTJK,
    dv_BTJV,
    dG_BTJ,
    dlog_decay_BTJ,
    scale,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """dk and dv of one chunk and value head, and with the queries' part of dG the log decay's
    gradient. Transposed scores are products of their own: transposing an accumulator has gone
    wrong on Hopper."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first = b * T + n * C
    value = j * V
    q_CK = chunk_rows(q_BTHK, bj, n, T, row_C, H, J, K, PRODUCT)
    k_CK = chunk_rows(k_BTHK, bj, n, T, row_C, H, J, K, PRODUCT)
    v_CV = chunk_rows(v_BTJV, bj, n, T, row_C, J, J, V, PRODUCT)
    do_CV = chunk_rows(do_BTJV, bj, n, T, row_C, J, J, V, PRODUCT)
    S_KV = tl.load(tile(states_BJNKV, (bj * N + n) * K, V, key_K, value_V)).to(tl.float32)
    dS_KV = tl.load(tile(dstates_BJNKV, (bj * N + n) * K, V, key_K, value_V)).to(PRODUCT)
    upto_CC, G_C, _, to_end_C, across = chunk_gates(
        log_decay_BTJ, document_T, bj, n, T, row_C, J, HAS_DOCUMENTS
    )
    carried = across * tl.sum(tl.sum(S_KV * dS_KV.to(tl.float32), 1), 0)
    after_CC = tl.trans(upto_CC)
    after_CC = tl.exp(tl.where(after_CC, G_C[None, :] - G_C[:, None], float("-inf"))) * scale

    dv_CV = tl.dot(k_CK, dS_KV) * to_end_C[:, None]
    kept_C = tl.sum(dv_CV * v_CV.to(tl.float32), 1)
    scores_CC = tl.dot(k_CK, tl.trans(q_CK))
    dv_CV = tl.dot((scores_CC * after_CC).to(PRODUCT), do_CV, dv_CV)
    dv_tile = tile(dv_BTJV + value, first, J * V, row_C, value_V)
    tl.store(dv_tile, dv_CV.to(dv_BTJV.dtype.element_ty), inside_C1)
    dP_CC = tl.dot(v_CV, tl.trans(do_CV)) * after_CC
    taken_C = kept_C + tl.sum(dP_CC * scores_CC, 1)
    dk_CK = tl.dot(v_CV, tl.trans(dS_KV)) * to_end_C[:, None]
    dk_CK = tl.dot(dP_CC.to(PRODUCT), q_CK, dk_CK)
    dk_tile = tile(dk_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk_BTJK.dtype.element_ty), inside_C1)

    last = tl.minimum(n * C + C, T) - 1
    gate_C = (b * T + t_C) * J + j
    dG_C = tl.load(dG_BTJ + gate_C, t_C < T, 0.0) - taken_C
    dG_C += tl.where(t_C == last, tl.sum(kept_C, 0) + carried, 0.0)
    dg_C = tl.sum(tl.where(upto_CC, dG_C[:, None], 0.0), 0)
    if HAS_DOCUMENTS:
        document_T += b * T
        follows_C = t_C + b > 0
        document_C = tl.load(document_T + t_C, t_C < T, -1)
        before_C = tl.load(document_T + t_C - 1, follows_C & (t_C < T), -1)
        dg_C = tl.where(follows_C & (document_C != before_C), 0.0, dg_C)
    tl.store(dlog_decay_BTJ + gate_C, dg_C, t_C < T)
