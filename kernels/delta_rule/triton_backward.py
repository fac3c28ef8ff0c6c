"""The delta rule's backward on a GPU: the gradients of v and of the states by a scan from the end,
then the others chunk by chunk. The equations are in README.md."""

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile


@triton.jit
def reverse_scan_kernel(
    q_BTHK,
    k_BTHK,
    do_BTJV,
    X_BJTC,
    P_BJTC,
    rows_4BJT,
    across_BJN,
    dfinal_BJKV,
    dv_BTJV,
    dstates_BJNKV,
    dinitial_BJKV,
    T,
    N,
    plane,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    STATE_EVERY: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of v and of the state after the last of every STATE_EVERY chunks, of BLOCK_V
    columns of one value head."""
    column = tl.program_id(0) * BLOCK_V
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    head = (j // (J // H)) * K
    dS_KV = tl.zeros([K, BLOCK_V], tl.float32)
    if HAS_DFINAL:
        dS_KV = tl.load(tile(dfinal_BJKV + column, bj * K, V, key_K, value_V)).to(tl.float32)
    for step in tl.range(0, N, num_stages=STAGES):
        n = N - 1 - step
        first = b * T + n * C
        chunk = bj * N * C + n * C
        inside_C1 = (row_C < T - n * C)[:, None]
        k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
        q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
        do_tile = tile(do_BTJV + j * V + column, first, J * V, row_C, value_V)
        do_CV = tl.load(do_tile, inside_C1, 0.0)
        X_CC = tl.load(tile(X_BJTC, chunk, C, row_C, row_C))
        P_CC = tl.load(tile(P_BJTC, chunk, C, row_C, row_C))
        read_C = tl.load(rows_4BJT + chunk + row_C)
        write_C = tl.load(rows_4BJT + plane + chunk + row_C)
        query_C = tl.load(rows_4BJT + 2 * plane + chunk + row_C)
        across = tl.load(across_BJN + bj * N + n)
        k_CK, q_CK = k_CK.to(PRODUCT), q_CK.to(PRODUCT)
        dS_low_KV = dS_KV.to(PRODUCT)
        if (n % STATE_EVERY == STATE_EVERY - 1) | (n == N - 1):
            stored = (bj * tl.cdiv(N, STATE_EVERY) + n // STATE_EVERY) * K
            pointers = tile(dstates_BJNKV + column, stored, V, key_K, value_V)
            tl.store(pointers, dS_low_KV.to(dstates_BJNKV.dtype.element_ty))
        dU_CV = tl.dot(k_CK, dS_low_KV) * write_C[:, None]
        dU_CV = tl.dot(tl.trans(P_CC.to(PRODUCT)), do_CV.to(PRODUCT), dU_CV)
        dR_CV = tl.dot(tl.trans(X_CC.to(PRODUCT)), dU_CV.to(PRODUCT))
        dv_tile = tile(dv_BTJV + j * V + column, first, J * V, row_C, value_V)
        tl.store(dv_tile, dR_CV.to(dv_BTJV.dtype.element_ty), inside_C1)
        read_CV = (do_CV.to(tl.float32) * query_C[:, None]).to(PRODUCT)
        dS_KV = tl.dot(tl.trans(q_CK), read_CV, dS_KV * across)
        seen_CV = (-dR_CV * read_C[:, None]).to(PRODUCT)
        dS_KV = tl.dot(tl.trans(k_CK), seen_CV, dS_KV)
    tl.store(tile(dinitial_BJKV + column, bj * K, V, key_K, value_V), dS_KV)


@triton.jit
def gradient_kernel(
    q_BTHK,
    k_BTHK,
    U_BTJV,
    do_BTJV,
    dv_BTJV,
    log_decay_BTJ,
    eta_BTJ,
    document_T,
    rows_4BJT,
    across_BJN,
    states_BJNKV,
    dstates_BJNKV,
    dq_BTJK,
    dk_BTJK,
    dlog_decay_BTJ,
    deta_BTJ,
    scale,
    T,
    plane,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    STATE_EVERY: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Every gradient but v's of one chunk of one value head, from the state before it, the
    gradient of the state after it, U and its gradient's solution dR, which is v's gradient."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first = b * T + n * C
    chunk = bj * N * C + n * C
    head = (j // (J // H)) * K
    k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    read_C = tl.load(rows_4BJT + chunk + row_C)
    write_C = tl.load(rows_4BJT + plane + chunk + row_C)
    query_C = tl.load(rows_4BJT + 2 * plane + chunk + row_C)
    across = tl.load(across_BJN + bj * N + n)
    r_C = tl.load(rows_4BJT + 3 * plane + chunk + row_C)
    gate_C = (b * T + t_C) * J + j
    eta_C = tl.load(eta_BTJ + gate_C, t_C < T, 1.0).to(tl.float32)
    eta_C = tl.maximum(eta_C, 2.0**-40)
    rescales_v: tl.constexpr = STEP_SIZE != "learned"
    rv_C = tl.full([C], 1.0, tl.float32)
    if rescales_v:
        rv_C = tl.where(t_C < T, r_C, 1.0)
    dq_CK = tl.zeros([C, K], tl.float32)
    dk_CK = tl.zeros([C, K], tl.float32)
    dP_CC = tl.zeros([C, C], tl.float32)
    dM_CC = tl.zeros([C, C], tl.float32)
    seen_C = tl.zeros([C], tl.float32)
    kept_C = tl.zeros([C], tl.float32)
    carried = 0.0
    group = n // STATE_EVERY
    for i_v in range(V // BLOCK_V):
        value = i_v * BLOCK_V
        stored = (bj * tl.cdiv(N, STATE_EVERY) + group) * K
        S_KV = tl.load(tile(states_BJNKV + value, stored, V, key_K, value_V)).to(PRODUCT)
        dS_KV = tl.load(tile(dstates_BJNKV + value, stored, V, key_K, value_V)).to(PRODUCT)
        value = j * V + value
        do_CV = tl.load(tile(do_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0)
        dR_CV = tl.load(tile(dv_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0)
        U_CV = tl.load(tile(U_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0)
        for m in range(group * STATE_EVERY, n):
            S_KV = _state_after(
                S_KV, k_BTHK + head, U_BTJV + value, rows_4BJT + plane, across_BJN,
                bj * N + m, b * T + m * C, row_C, key_K, value_V, H, J, K, V, C, PRODUCT,
            )  # fmt: skip
        behind = tl.minimum(group * STATE_EVERY + STATE_EVERY, N) - 1
        for step in range(behind - n):
            m = behind - step
            dS_KV = _gradient_before(
                dS_KV, q_BTHK + head, k_BTHK + head, do_BTJV + value, dv_BTJV + value, rows_4BJT,
                across_BJN, bj * N + m, b * T + m * C, T - m * C, plane, row_C, key_K, value_V,
                H, J, K, V, C, PRODUCT,
            )  # fmt: skip
        carried += tl.sum(tl.sum(S_KV.to(tl.float32) * dS_KV.to(tl.float32), 1), 0)
        do_CV, dR_CV, U_CV = do_CV.to(PRODUCT), dR_CV.to(PRODUCT), U_CV.to(PRODUCT)
        dP_CC = tl.dot(do_CV, tl.trans(U_CV), dP_CC)
        dM_CC = tl.dot(dR_CV, tl.trans(U_CV), dM_CC)
        dq_CK = tl.dot(do_CV, tl.trans(S_KV), dq_CK)
        seen_CK = tl.dot(dR_CV, tl.trans(S_KV)) * read_C[:, None]
        seen_C += tl.sum(seen_CK * k_CK.to(tl.float32), 1)
        kept_CK = tl.dot(U_CV, tl.trans(dS_KV)) * write_C[:, None]
        kept_C += tl.sum(kept_CK * k_CK.to(tl.float32), 1)
        dk_CK += kept_CK - seen_CK

    dq_CK = dq_CK * query_C[:, None]
    dG_C = tl.sum(dq_CK * q_CK.to(tl.float32), 1) - seen_C - kept_C
    step_C = tl.sum(tl.where(row_C[:, None] == row_C[None, :], dM_CC, 0.0), 1)

    # Within the chunk: A_ij = eta_i D_ij <k~_i, k~_j> below the diagonal, P_ij = D_ij <q^_i, k~_j>.
    upto_CC = row_C[:, None] >= row_C[None, :]
    if HAS_DOCUMENTS:
        document_T += b * T
        document_C = tl.load(document_T + t_C, t_C < T, -1)
        follows_C = t_C + b > 0
        opens_C = follows_C & (
            document_C != tl.load(document_T + t_C - 1, follows_C & (t_C < T), -1)
        )
        upto_CC = upto_CC & (document_C[:, None] == document_C[None, :])
    decay_CC = tl.where(upto_CC, 1.0, 0.0)
    if HAS_DECAY:
        g_C = tl.load(log_decay_BTJ + gate_C, t_C < T, 0.0).to(tl.float32)
        g_C = tl.maximum(g_C, -64.0)
        if HAS_DOCUMENTS:
            g_C = tl.where(opens_C, 0.0, g_C)
        G_C = tl.sum(tl.where(upto_CC, g_C[None, :], 0.0), 1)
        decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf")))
    dP_CC = dP_CC * decay_CC * scale * r_C[None, :]
    dM_CC = -dM_CC * decay_CC * (r_C / rv_C)[:, None] * r_C[None, :]
    dM_CC = tl.where(row_C[:, None] > row_C[None, :], dM_CC, 0.0)
    if HAS_DECAY:
        dG_CC = dP_CC * tl.dot(q_CK, tl.trans(k_CK)) + dM_CC * tl.dot(k_CK, tl.trans(k_CK))
        dG_C += tl.sum(dG_CC, 1) - tl.sum(dG_CC, 0)
        last = tl.minimum(n * C + C, T) - 1
        dG_C += tl.where(t_C == last, tl.sum(kept_C, 0) + across * carried, 0.0)
        dg_C = tl.sum(tl.where(upto_CC, dG_C[:, None], 0.0), 0)
        if HAS_DOCUMENTS:
            dg_C = tl.where(opens_C, 0.0, dg_C)
        tl.store(dlog_decay_BTJ + gate_C, dg_C, t_C < T)

    dP_low_CC = dP_CC.to(PRODUCT)
    dM_low_CC = (dM_CC + tl.trans(dM_CC)).to(PRODUCT)
    dq_CK = tl.dot(dP_low_CC, k_CK, dq_CK)
    dk_CK = tl.dot(tl.trans(dP_low_CC), q_CK, dk_CK)
    dk_CK = tl.dot(dM_low_CC, k_CK, dk_CK)
    # What the step beta is worth: beta dbeta.
    step_C = step_C / (eta_C * rv_C)
    deta_C = step_C / eta_C
    if STEP_SIZE == "kaczmarz":
        dk_CK = dk_CK - (2 * step_C * r_C * r_C)[:, None] * k_CK.to(tl.float32)
    elif STEP_SIZE == "longhorn":
        deta_C = deta_C * r_C * r_C
        dk_CK = dk_CK - (2 * step_C * eta_C * r_C * r_C)[:, None] * k_CK.to(tl.float32)
    tl.store(deta_BTJ + gate_C, deta_C, t_C < T)
    dq_tile = tile(dq_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dq_tile, dq_CK.to(dq_BTJK.dtype.element_ty), inside_C1)
    dk_tile = tile(dk_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk_BTJK.dtype.element_ty), inside_C1)


@triton.jit
def _state_after(
    S_KV, k_BTHK, U_BTJV, write_BJT, across_BJN, chunk, first, row_C, key_K, value_V,
    H: tl.constexpr, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """The state after a whole chunk from the one before it."""
    k_CK = tl.load(tile(k_BTHK, first, H * K, row_C, key_K)).to(PRODUCT)
    U_CV = tl.load(tile(U_BTJV, first, J * V, row_C, value_V)).to(tl.float32)
    write_C = tl.load(write_BJT + chunk * C + row_C)
    across = tl.load(across_BJN + chunk)
    write_CV = (U_CV * write_C[:, None]).to(PRODUCT)
    return tl.dot(tl.trans(k_CK), write_CV, S_KV.to(tl.float32) * across).to(PRODUCT)


@triton.jit
def _gradient_before(
    dS_KV, q_BTHK, k_BTHK, do_BTJV, dv_BTJV, rows_4BJT, across_BJN, chunk, first, rows, plane,
    row_C, key_K, value_V,
    H: tl.constexpr, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """The gradient of the state before a chunk, of so many rows, from that of the one after it."""
    inside_C1 = (row_C < rows)[:, None]
    q_CK = tl.load(tile(q_BTHK, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    k_CK = tl.load(tile(k_BTHK, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    do_CV = tl.load(tile(do_BTJV, first, J * V, row_C, value_V), inside_C1, 0.0).to(tl.float32)
    dR_CV = tl.load(tile(dv_BTJV, first, J * V, row_C, value_V), inside_C1, 0.0).to(tl.float32)
    read_C = tl.load(rows_4BJT + chunk * C + row_C)
    query_C = tl.load(rows_4BJT + 2 * plane + chunk * C + row_C)
    across = tl.load(across_BJN + chunk)
    dS_KV = dS_KV.to(tl.float32) * across
    dS_KV = tl.dot(tl.trans(q_CK), (do_CV * query_C[:, None]).to(PRODUCT), dS_KV)
    return tl.dot(tl.trans(k_CK), (-dR_CV * read_C[:, None]).to(PRODUCT), dS_KV).to(PRODUCT)
