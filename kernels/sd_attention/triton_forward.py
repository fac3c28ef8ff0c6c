"""S-D attention's forward on a GPU: a tile of queries of one head meets the keys before it.

S_ij = scale (q_i . k_j - k_i . q_j) is two products; each token's own term -d_i is where the
softmax starts from. Logits are in units of log 2.
"""

# Triton's ranges say nothing of what they yield.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import LOG2_E, gather, scatter


@triton.jit(do_not_specialize=["T"])
def sd_forward_kernel(
    q_THK,
    k_THK,
    v_THV,
    d_TH,
    start_T,
    o_THV,
    lse_HT,
    scale,
    T,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """o and the log-sum-exp of Q tokens of one head; S keys at a time."""
    head = tl.program_id(0) % H
    n = tl.program_id(0) // H
    t_Q = n * Q + tl.arange(0, Q)
    key_K, value_V = tl.arange(0, K), tl.arange(0, V)
    q_head, k_head, v_head = q_THK + head * K, k_THK + head * K, v_THV + head * V
    q_QK = gather(q_head, t_Q, q_stride, key_K, T, True).to(PRODUCT)
    minus_k_QK = -gather(k_head, t_Q, k_stride, key_K, T, True).to(PRODUCT)
    start_Q = tl.load(start_T + t_Q, t_Q < T, 0)
    d_Q = tl.load(d_TH + t_Q.to(tl.int64) * H + head, t_Q < T, 0.0).to(tl.float32)
    largest_Q = -d_Q * LOG2_E
    sum_Q = tl.full([Q], 1.0, tl.float32)
    o_QV = gather(v_head, t_Q, v_stride, value_V, T, True).to(tl.float32)
    first, whole_first, whole_end, end = keys_before(start_T, n, T, Q, S)
    scale2 = scale * LOG2_E
    for masked in tl.static_range(2):
        for i in tl.range(
            first if masked else whole_first,
            end - (whole_end - whole_first) if masked else whole_end,
            num_stages=STAGES,
        ):
            block = i
            if masked:
                block = tl.where(i < whole_first, i, i + whole_end - whole_first)
            s_S = block * S + tl.arange(0, S)
            k_SK = gather(k_head, s_S, k_stride, key_K, T, masked).to(PRODUCT)
            q_SK = gather(q_head, s_S, q_stride, key_K, T, masked).to(PRODUCT)
            v_SV = gather(v_head, s_S, v_stride, value_V, T, masked).to(PRODUCT)
            S_QS = tl.dot(minus_k_QK, tl.trans(q_SK), tl.dot(q_QK, tl.trans(k_SK)))
            if masked:
                earlier_QS = (s_S[None, :] < t_Q[:, None]) & (s_S[None, :] >= start_Q[:, None])
                S_QS = tl.where(earlier_QS, S_QS, float("-inf"))
            larger_Q = tl.maximum(largest_Q, tl.max(S_QS, 1) * scale2)
            weights_QS = tl.exp2(S_QS * scale2 - larger_Q[:, None])
            shrink_Q = tl.exp2(largest_Q - larger_Q)
            sum_Q = sum_Q * shrink_Q + tl.sum(weights_QS, 1)
            o_QV = tl.dot(weights_QS.to(PRODUCT), v_SV, o_QV * shrink_Q[:, None])
            largest_Q = larger_Q
    scatter(o_THV + head * V, t_Q, H * V, value_V, T, o_QV / sum_Q[:, None])
    tl.store(lse_HT + head.to(tl.int64) * T + t_Q, largest_Q + tl.log2(sum_Q), t_Q < T)


@triton.jit
def keys_before(start_T, n, T, Q: tl.constexpr, S: tl.constexpr):
    """Blocks of S keys that the n-th tile of Q tokens meets, from `first` to `end`; those from
    `whole_first` to `whole_end` are before all of the tile and in the same document."""
    last = tl.minimum(n * Q + Q, T) - 1
    first = tl.load(start_T + n * Q) // S
    whole_first = tl.cdiv(tl.load(start_T + last), S)
    whole_end = tl.maximum(n * Q // S, whole_first)
    return first, whole_first, whole_end, tl.cdiv(last, S)
