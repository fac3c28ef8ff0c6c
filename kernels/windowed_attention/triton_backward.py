"""Windowed attention's backward on a GPU: dq by tiles of queries, dk and dv by tiles of keys.

Each row is written once, in an order that does not change. The equations are in README.md.
"""

# Triton's ranges say nothing of what they yield.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import LOG2_E, gather, scatter
from mixtron.kernels.windowed_attention.triton_forward import attended, rows, window


@triton.jit(do_not_specialize=["before", "reach", "query_rows", "key_rows", "most", "slots"])
def windowed_query_gradient_kernel(
    q_THK,
    k_SGK,
    v_SGV,
    o_THV,
    do_THV,
    lse_HT,
    delta_HT,
    dq_THK,
    query_row,
    query_slot,
    query_token,
    query_start,
    key_row,
    key_slot,
    key_token,
    tiles_NM,
    count_N,
    whole_N,
    scale,
    before,
    reach,
    query_rows,
    key_rows,
    most,
    slots,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """dq of Q slots of one head, and delta = do . o, which the keys' gradients need too."""
    head = tl.program_id(0) % H
    n = tl.program_id(0) // H
    slot_Q = n * Q + tl.arange(0, Q)
    row_Q = rows(query_row, slot_Q, PLAIN)
    key_K, value_V = tl.arange(0, K), tl.arange(0, V)
    q_QK = gather(q_THK + head * K, row_Q, q_stride, key_K, query_rows, True).to(PRODUCT)
    o_QV = gather(o_THV + head * V, row_Q, H * V, value_V, query_rows, True)
    do_QV = gather(do_THV + head * V, row_Q, H * V, value_V, query_rows, True)
    delta_Q = tl.sum(o_QV.to(tl.float32) * do_QV.to(tl.float32), 1)
    do_QV = do_QV.to(PRODUCT)
    at_Q = head.to(tl.int64) * slots + slot_Q
    tl.store(delta_HT + at_Q, delta_Q)
    lse_Q = tl.load(lse_HT + at_Q)
    first_Q, token_Q, back_Q = window(query_slot, query_token, query_start, slot_Q, before)
    k_head, v_head = k_SGK + head // (H // G) * K, v_SGV + head // (H // G) * V
    dq_QK = tl.zeros([Q, K], tl.float32)
    count, whole = tl.load(count_N + n), tl.load(whole_N + n)
    listed = tiles_NM + n.to(tl.int64) * most
    scale2 = scale * LOG2_E
    for masked in tl.static_range(2):
        for i in tl.range(whole if masked else 0, count if masked else whole, num_stages=STAGES):
            slot_S = tl.load(listed + i) * S + tl.arange(0, S)
            row_S = rows(key_row, slot_S, PLAIN)
            k_SK = gather(k_head, row_S, k_stride, key_K, key_rows, masked).to(PRODUCT)
            v_SV = gather(v_head, row_S, v_stride, value_V, key_rows, masked).to(PRODUCT)
            logits_QS = tl.dot(q_QK, tl.trans(k_SK))
            if masked:
                key_slot_S, key_token_S = tl.load(key_slot + slot_S), tl.load(key_token + slot_S)
                allowed_QS = attended(
                    first_Q[:, None], token_Q[:, None], back_Q[:, None],
                    key_slot_S[None, :], key_token_S[None, :], reach,
                )  # fmt: skip
                logits_QS = tl.where(allowed_QS, logits_QS, float("-inf"))
            weights_QS = tl.exp2(logits_QS * scale2 - lse_Q[:, None])
            ds_QS = weights_QS * (tl.dot(do_QV, tl.trans(v_SV)) - delta_Q[:, None])
            dq_QK = tl.dot(ds_QS.to(PRODUCT), k_SK, dq_QK)
    scatter(dq_THK + head * K, row_Q, H * K, key_K, query_rows, dq_QK * scale)


@triton.jit(do_not_specialize=["before", "reach", "query_rows", "key_rows", "most", "slots"])
def windowed_key_gradients_kernel(
    q_THK,
    k_SGK,
    v_SGV,
    do_THV,
    lse_HT,
    delta_HT,
    dk_SGK,
    dv_SGV,
    query_row,
    query_slot,
    query_token,
    query_start,
    key_row,
    key_slot,
    key_token,
    tiles_NM,
    count_N,
    whole_N,
    scale,
    before,
    reach,
    query_rows,
    key_rows,
    most,
    slots,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """dk and dv of S slots of one key/value head, over the heads that share it."""
    group = tl.program_id(0) % G
    n = tl.program_id(0) // G
    slot_S = n * S + tl.arange(0, S)
    row_S = rows(key_row, slot_S, PLAIN)
    key_K, value_V = tl.arange(0, K), tl.arange(0, V)
    k_SK = gather(k_SGK + group * K, row_S, k_stride, key_K, key_rows, True).to(PRODUCT)
    v_SV = gather(v_SGV + group * V, row_S, v_stride, value_V, key_rows, True).to(PRODUCT)
    key_slot_S, key_token_S = tl.load(key_slot + slot_S), tl.load(key_token + slot_S)
    dk_SK = tl.zeros([S, K], tl.float32)
    dv_SV = tl.zeros([S, V], tl.float32)
    count, whole = tl.load(count_N + n), tl.load(whole_N + n)
    listed = tiles_NM + n.to(tl.int64) * most
    scale2 = scale * LOG2_E
    for shared in range(H // G):
        head = group * (H // G) + shared
        q_head, do_head = q_THK + head * K, do_THV + head * V
        lse_T, delta_T = lse_HT + head.to(tl.int64) * slots, delta_HT + head.to(tl.int64) * slots
        for masked in tl.static_range(2):
            for i in tl.range(
                whole if masked else 0, count if masked else whole, num_stages=STAGES
            ):
                slot_Q = tl.load(listed + i) * Q + tl.arange(0, Q)
                row_Q = rows(query_row, slot_Q, PLAIN)
                q_QK = gather(q_head, row_Q, q_stride, key_K, query_rows, masked).to(PRODUCT)
                do_QV = gather(do_head, row_Q, H * V, value_V, query_rows, masked).to(PRODUCT)
                logits_SQ = tl.dot(k_SK, tl.trans(q_QK))
                if masked:
                    first_Q, token_Q, back_Q = window(
                        query_slot, query_token, query_start, slot_Q, before
                    )
                    allowed_SQ = attended(
                        first_Q[None, :], token_Q[None, :], back_Q[None, :],
                        key_slot_S[:, None], key_token_S[:, None], reach,
                    )  # fmt: skip
                    logits_SQ = tl.where(allowed_SQ, logits_SQ, float("-inf"))
                weights_SQ = tl.exp2(logits_SQ * scale2 - tl.load(lse_T + slot_Q)[None, :])
                dv_SV = tl.dot(weights_SQ.to(PRODUCT), do_QV, dv_SV)
                dweights_SQ = tl.dot(v_SV, tl.trans(do_QV))
                ds_SQ = weights_SQ * (dweights_SQ - tl.load(delta_T + slot_Q)[None, :])
                dk_SK = tl.dot(ds_SQ.to(PRODUCT), q_QK, dk_SK)
    scatter(dk_SGK + group * K, row_S, G * K, key_K, key_rows, dk_SK * scale)
    scatter(dv_SGV + group * V, row_S, G * V, value_V, key_rows, dv_SV)
