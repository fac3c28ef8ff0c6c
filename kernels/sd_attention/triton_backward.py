"""S-D attention's backward on a GPU: a tile of tokens meets all others, as queries the keys before
it and as keys the queries after it.

S is skew: with X_ij = q_i . k_j - k_i . q_j both parts compute the same X of own and other rows,
and q and k have gradients from both. So a tile's gradients are summed in one place, in an order
that does not change, and every tile of a document has as much to do as any other:

    dq_i = scale (sum_{j<i} dS_ij k_j - sum_{l>i} dS_li k_l)
    dk_i = scale (sum_{l>i} dS_li q_l - sum_{j<i} dS_ij q_j)
"""

# Triton's ranges say nothing of what they yield.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.sd_attention.triton_forward import keys_before
from mixtron.kernels.triton_tools import LOG2_E, gather, scatter


@triton.jit(do_not_specialize=["T"])
def sd_delta_kernel(o_THV, do_THV, delta_HT, T, H: tl.constexpr, V: tl.constexpr, C: tl.constexpr):
    """delta = do . o of C tokens of one head."""
    head = tl.program_id(0) % H
    t_C = tl.program_id(0) // H * C + tl.arange(0, C)
    value_V = tl.arange(0, V)
    o_CV = gather(o_THV + head * V, t_C, H * V, value_V, T, True).to(tl.float32)
    do_CV = gather(do_THV + head * V, t_C, H * V, value_V, T, True).to(tl.float32)
    tl.store(delta_HT + head.to(tl.int64) * T + t_C, tl.sum(o_CV * do_CV, 1), t_C < T)


@triton.jit(do_not_specialize=["T"])
def sd_gradient_kernel(
    q_THK,
    k_THK,
    v_THV,
    d_TH,
    do_THV,
    start_T,
    end_T,
    lse_HT,
    delta_HT,
    dq_THK,
    dk_THK,
    dv_THV,
    dd_TH,
    scale,
    T,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every gradient of C tokens of one head; S others at a time."""
    head = tl.program_id(0) % H
    n = tl.program_id(0) // H
    t_C = n * C + tl.arange(0, C)
    key_K, value_V = tl.arange(0, K), tl.arange(0, V)
    q_head, k_head, v_head = q_THK + head * K, k_THK + head * K, v_THV + head * V
    do_head, lse_T, delta_T = (
        do_THV + head * V,
        lse_HT + head.to(tl.int64) * T,
        delta_HT + head.to(tl.int64) * T,
    )
    q_CK = gather(q_head, t_C, q_stride, key_K, T, True).to(PRODUCT)
    minus_k_CK = -gather(k_head, t_C, k_stride, key_K, T, True).to(PRODUCT)
    v_CV = gather(v_head, t_C, v_stride, value_V, T, True).to(PRODUCT)
    do_CV = gather(do_head, t_C, H * V, value_V, T, True).to(PRODUCT)
    lse_C = tl.load(lse_T + t_C, t_C < T, float("inf"))
    delta_C = tl.load(delta_T + t_C, t_C < T, 0.0)
    start_C = tl.load(start_T + t_C, t_C < T, 0)
    end_C = tl.load(end_T + t_C, t_C < T, 0)
    dq_CK = tl.zeros([C, K], tl.float32)
    dk_CK = tl.zeros([C, K], tl.float32)
    scale2 = scale * LOG2_E

    # As queries. dq and, negated, dk.
    first, whole_first, whole_end, end = keys_before(start_T, n, T, C, S)
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
            X_CS = tl.dot(minus_k_CK, tl.trans(q_SK), tl.dot(q_CK, tl.trans(k_SK)))
            if masked:
                earlier_CS = (s_S[None, :] < t_C[:, None]) & (s_S[None, :] >= start_C[:, None])
                X_CS = tl.where(earlier_CS, X_CS, float("-inf"))
            weights_CS = tl.exp2(X_CS * scale2 - lse_C[:, None])
            dS_CS = weights_CS * (tl.dot(do_CV, tl.trans(v_SV)) - delta_C[:, None])
            dS_CS = dS_CS.to(PRODUCT)
            dq_CK = tl.dot(dS_CS, k_SK, dq_CK)
            dk_CK = tl.dot(dS_CS, q_SK, dk_CK)

    # As keys. dk and, negated, dq; the scores are -X.
    dq_CK, dk_CK = -dq_CK, -dk_CK
    dv_CV = tl.zeros([C, V], tl.float32)
    first, whole_first, whole_end, end = queries_after(end_T, n, T, C, S)
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
            do_SV = gather(do_head, s_S, H * V, value_V, T, masked).to(PRODUCT)
            X_CS = tl.dot(minus_k_CK, tl.trans(q_SK), tl.dot(q_CK, tl.trans(k_SK)))
            if masked:
                later_CS = (s_S[None, :] > t_C[:, None]) & (s_S[None, :] < end_C[:, None])
                X_CS = tl.where(later_CS, X_CS, float("inf"))
                lse_S = tl.load(lse_T + s_S, s_S < T, 0.0)
                delta_S = tl.load(delta_T + s_S, s_S < T, 0.0)
            else:
                lse_S, delta_S = tl.load(lse_T + s_S), tl.load(delta_T + s_S)
            weights_CS = tl.exp2(-X_CS * scale2 - lse_S[None, :])
            dv_CV = tl.dot(weights_CS.to(PRODUCT), do_SV, dv_CV)
            dS_CS = weights_CS * (tl.dot(v_CV, tl.trans(do_SV)) - delta_S[None, :])
            dS_CS = dS_CS.to(PRODUCT)
            dq_CK = tl.dot(dS_CS, k_SK, dq_CK)
            dk_CK = tl.dot(dS_CS, q_SK, dk_CK)

    # Each token's own term.
    gate_C = t_C.to(tl.int64) * H + head
    d_C = tl.load(d_TH + gate_C, t_C < T, 0.0).to(tl.float32)
    own_C = tl.exp2(-d_C * LOG2_E - lse_C)
    do_CV, v_CV = do_CV.to(tl.float32), v_CV.to(tl.float32)
    tl.store(dd_TH + gate_C, own_C * (delta_C - tl.sum(do_CV * v_CV, 1)), t_C < T)
    scatter(dq_THK + head * K, t_C, H * K, key_K, T, -dq_CK * scale)
    scatter(dk_THK + head * K, t_C, H * K, key_K, T, dk_CK * scale)
    scatter(dv_THV + head * V, t_C, H * V, value_V, T, dv_CV + own_C[:, None] * do_CV)


@triton.jit
def queries_after(end_T, n, T, C: tl.constexpr, S: tl.constexpr):
    """As `keys_before`, of the queries that the n-th tile's keys are attended by."""
    last = tl.minimum(n * C + C, T) - 1
    first = (n * C + 1) // S
    whole_first = tl.cdiv(last + 1, S)
    whole_end = tl.load(end_T + n * C) // S
    end = tl.cdiv(tl.load(end_T + last), S)
    whole_end = tl.maximum(whole_end, whole_first)
    return first, whole_first, whole_end, end
