"""Windowed attention's forward on a GPU: a tile of queries of one head meets the tiles in its list.

Rows of q, k and v are gathered through the plan's indices. The tiles that a list holds first need
no mask. The log-sum-exp is in units of log 2 and kept slot by slot.
"""

# Triton's ranges say nothing of what they yield.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import LOG2_E, gather, scatter


@triton.jit(do_not_specialize=["before", "reach", "query_rows", "key_rows", "most", "slots"])
def windowed_forward_kernel(
    q_THK,
    k_SGK,
    v_SGV,
    o_THV,
    lse_HT,
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
    """o and the log-sum-exp of Q slots of one head; S keys at a time."""
    head = tl.program_id(0) % H
    n = tl.program_id(0) // H
    slot_Q = n * Q + tl.arange(0, Q)
    row_Q = rows(query_row, slot_Q, PLAIN)
    key_K, value_V = tl.arange(0, K), tl.arange(0, V)
    q_QK = gather(q_THK + head * K, row_Q, q_stride, key_K, query_rows, True).to(PRODUCT)
    first_Q, token_Q, back_Q = window(query_slot, query_token, query_start, slot_Q, before)
    k_head, v_head = k_SGK + head // (H // G) * K, v_SGV + head // (H // G) * V
    o_QV = tl.zeros([Q, V], tl.float32)
    largest_Q = tl.full([Q], float("-inf"), tl.float32)
    sum_Q = tl.zeros([Q], tl.float32)
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
            larger_Q = tl.maximum(largest_Q, tl.max(logits_QS, 1))
            # Nothing attended yet: any finite number keeps the weights 0.
            finite_Q = tl.where(larger_Q == float("-inf"), 0.0, larger_Q) * scale2
            weights_QS = tl.exp2(logits_QS * scale2 - finite_Q[:, None])
            shrink_Q = tl.exp2(largest_Q * scale2 - finite_Q)
            sum_Q = sum_Q * shrink_Q + tl.sum(weights_QS, 1)
            o_QV = tl.dot(weights_QS.to(PRODUCT), v_SV, o_QV * shrink_Q[:, None])
            largest_Q = larger_Q
    # A slot that attends nothing is empty: its output is 0, and its weights in backward.
    nothing_Q = sum_Q == 0.0
    sum_Q = tl.where(nothing_Q, 1.0, sum_Q)
    lse_Q = tl.where(nothing_Q, float("inf"), largest_Q * scale2 + tl.log2(sum_Q))
    scatter(o_THV + head * V, row_Q, H * V, value_V, query_rows, o_QV / sum_Q[:, None])
    tl.store(lse_HT + head.to(tl.int64) * slots + slot_Q, lse_Q)


@triton.jit
def rows(row_NC, slot_C, PLAIN: tl.constexpr):
    """Of slots of a piece."""
    if PLAIN:
        return slot_C
    return tl.load(row_NC + slot_C)


@triton.jit
def window(query_slot, query_token, query_start, slot_Q, before):
    """Of each query: the first slot that it sees, its token, and how far back its document goes."""
    token_Q = tl.load(query_token + slot_Q)
    back_Q = token_Q - tl.load(query_start + slot_Q)
    return tl.load(query_slot + slot_Q) - before, token_Q, back_Q


@triton.jit
def attended(first, token, back, key_slot, key_token, reach):
    """Whether the key's slot is in the window, its token not later and in the same document.

    A negative difference is large as an unsigned number, and fails too. An empty slot's token is
    the largest integer.
    """
    distance = (key_slot - first).to(tl.uint32, bitcast=True)
    age = (token - key_token).to(tl.uint32, bitcast=True)
    return (distance <= reach.to(tl.uint32)) & (age <= back.to(tl.uint32, bitcast=True))
