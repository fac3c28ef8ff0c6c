"""The second half of the delta rule's backward on a GPU: what is left once the gradients of v and
of the states are known, chunk by chunk. The equations are in README.md.

Two kernels: one program of both would fill the registers of a multiprocessor and wait for its loads
alone.
"""

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile


@triton.jit
def pairs_kernel(
    o_BTJV,
    U_BTJV,
    do_BTJV,
    dv_BTJV,
    log_decay_BTJ,
    eta_BTJ,
    document_T,
    rows_5BJT,
    dP_BJTC,
    dM_BJTC,
    along_2BJT,
    deta_BTJ,
    scale,
    T,
    plane,
    J: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk of one value head: the gradients dP of <q_i, k_j> and dM of <k_i, k_j>, as the
    products take them, of eta, and what the lengths take from dk and dq for each k and q: the step
    size's |k|^2, and |q| where q is normalised, as <q, dq> = <o, do>."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    value_V = tl.arange(0, BLOCK_V)
    t_C = n * C + row_C
    inside_C = t_C < T
    first = b * T + n * C
    chunk = bj * N * C + n * C
    dP_CC = tl.zeros([C, C], tl.float32)
    dM_CC = tl.zeros([C, C], tl.float32)
    step_C = tl.zeros([C], tl.float32)
    turn_C = tl.zeros([C], tl.float32)
    for i_v in tl.range(0, V // BLOCK_V, num_stages=1):
        value = j * V + i_v * BLOCK_V
        do_tile = tile(do_BTJV + value, first, J * V, row_C, value_V)
        dR_tile = tile(dv_BTJV + value, first, J * V, row_C, value_V)
        U_tile = tile(U_BTJV + value, first, J * V, row_C, value_V)
        do_CV = tl.load(do_tile, inside_C[:, None], 0.0)
        dR_CV = tl.load(dR_tile, inside_C[:, None], 0.0)
        U_CV = tl.load(U_tile, inside_C[:, None], 0.0)
        if UNIT_QUERIES:
            o_tile = tile(o_BTJV + value, first, J * V, row_C, value_V)
            o_CV = tl.load(o_tile, inside_C[:, None], 0.0)
            turn_C += tl.sum(o_CV.to(tl.float32) * do_CV.to(tl.float32), 1)
        step_C += tl.sum(dR_CV.to(tl.float32) * U_CV.to(tl.float32), 1)
        U_VC = tl.trans(U_CV.to(PRODUCT))
        dP_CC = tl.dot(do_CV.to(PRODUCT), U_VC, dP_CC)
        dM_CC = tl.dot(dR_CV.to(PRODUCT), U_VC, dM_CC)
    gate_C = (b * T + t_C) * J + j
    # As prepare_kernel bounds it.
    eta_C = tl.maximum(tl.load(eta_BTJ + gate_C, inside_C, 1.0).to(tl.float32), 2.0**-40)
    r_C = tl.load(rows_5BJT + 3 * plane + chunk + row_C)
    rv_C = tl.full([C], 1.0, tl.float32)
    if STEP_SIZE != "learned":
        rv_C = tl.where(inside_C, r_C, 1.0)
    # What the step beta is worth: beta dbeta.
    step_C = step_C / (eta_C * rv_C)
    deta_C = step_C / eta_C
    pull_C = 2 * step_C * r_C * r_C
    if STEP_SIZE == "learned":
        pull_C = tl.zeros([C], tl.float32)
    elif STEP_SIZE == "longhorn":
        deta_C = deta_C * r_C * r_C
        pull_C = pull_C * eta_C
    tl.store(deta_BTJ + gate_C, deta_C, inside_C)
    unit_C = tl.load(rows_5BJT + 4 * plane + chunk + row_C)
    tl.store(along_2BJT + chunk + row_C, pull_C)
    tl.store(along_2BJT + plane + chunk + row_C, turn_C * unit_C * unit_C)

    upto_CC = row_C[:, None] >= row_C[None, :]
    if HAS_DOCUMENTS:
        document_T += b * T
        document_C = tl.load(document_T + t_C, inside_C, -1)
        upto_CC = upto_CC & (document_C[:, None] == document_C[None, :])
    decay_CC = tl.where(upto_CC, 1.0, 0.0)
    if HAS_DECAY:
        g_C = tl.load(log_decay_BTJ + gate_C, inside_C, 0.0).to(tl.float32)
        g_C = tl.maximum(g_C, -64.0)
        if HAS_DOCUMENTS:
            follows_C = inside_C & (t_C + b > 0)
            before_C = tl.load(document_T + t_C - 1, follows_C, -1)
            g_C = tl.where(follows_C & (document_C != before_C), 0.0, g_C)
        G_C = tl.sum(tl.where(upto_CC, g_C[None, :], 0.0), 1)
        decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf")))
    decay_CC = decay_CC * r_C[None, :]
    pair_CC = row_C[:, None] * C + row_C[None, :]
    dP_CC = dP_CC * decay_CC * (unit_C * scale)[:, None]
    tl.store(dP_BJTC + chunk * C + pair_CC, dP_CC.to(dP_BJTC.dtype.element_ty))
    dM_CC = dM_CC * decay_CC * (-r_C / rv_C)[:, None]
    dM_CC = tl.where(row_C[:, None] > row_C[None, :], dM_CC, 0.0)
    tl.store(dM_BJTC + chunk * C + pair_CC, dM_CC.to(dM_BJTC.dtype.element_ty))


@triton.jit
def gradient_kernel(
    q_BTHK,
    k_BTHK,
    U_BTJV,
    do_BTJV,
    dv_BTJV,
    rows_5BJT,
    across_BJN,
    states_BJGKV,
    dstates_BJNKV,
    dP_BJTC,
    dM_BJTC,
    along_2BJT,
    dq_SBTJK,
    dk_SBTJK,
    dG_2PBJT,
    carried_PBJN,
    T,
    N,
    plane,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    STATE_EVERY: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """STATE_EVERY chunks of one value head, one after another: BLOCK_K columns of the gradients of
    q and k, and what these columns add to the log decay's (see `decay_kernel`). From dP, dM, the
    state before the first chunk, the gradient of the state after each, U, and its gradient's
    solution dR, which is v's gradient.

    Of BLOCK_V columns of values; where there are more, results lie in as many strips to be added.
    """
    parts: tl.constexpr = K // BLOCK_K
    strips: tl.constexpr = V // BLOCK_V
    part = tl.program_id(0) % parts
    strip = tl.program_id(0) // parts % strips
    group = tl.program_id(0) // (parts * strips)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    tokens = tl.num_programs(1).to(tl.int64) // J * T
    row_C = tl.arange(0, C)
    key_K = part * BLOCK_K + tl.arange(0, BLOCK_K)
    value_V = strip * BLOCK_V + tl.arange(0, BLOCK_V)
    q_BTHK += (j // (J // H)) * K
    k_BTHK += (j // (J // H)) * K
    U_BTJV += j * V
    do_BTJV += j * V
    dv_BTJV += j * V
    dq_SBTJK += strip * tokens * J * K + j * K
    dk_SBTJK += strip * tokens * J * K + j * K
    stored = (bj * tl.cdiv(N, STATE_EVERY) + group) * K
    S_KV = tl.load(tile(states_BJGKV, stored, V, key_K, value_V)).to(tl.float32)
    begin = group * STATE_EVERY
    for n in tl.range(begin, tl.minimum(begin + STATE_EVERY, N), num_stages=STAGES):
        first = b * T + n * C
        chunk = bj * N * C + n * C
        t_C = n * C + row_C
        inside_C1 = (t_C < T)[:, None]
        k_CK = tl.load(tile(k_BTHK, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
        # Once more, as another operand needs it: a load of its own goes there directly.
        kT_tile = k_BTHK + first * H * K + (row_C[None, :] * (H * K) + key_K[:, None])
        k_KC = tl.load(kT_tile, (t_C < T)[None, :], 0.0)
        q_CK = tl.load(tile(q_BTHK, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
        do_CV = tl.load(tile(do_BTJV, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
        dR_CV = tl.load(tile(dv_BTJV, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
        U_CV = tl.load(tile(U_BTJV, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
        dS_KV = tl.load(tile(dstates_BJNKV, (bj * N + n) * K, V, key_K, value_V)).to(PRODUCT)
        # What is within the chunk, once.
        dP_CC = tl.load(tile(dP_BJTC, chunk, C, row_C, row_C), strip == 0, 0.0).to(PRODUCT)
        dM_CC = tl.load(tile(dM_BJTC, chunk, C, row_C, row_C), strip == 0, 0.0).to(PRODUCT)
        read_C = tl.load(rows_5BJT + chunk + row_C)
        write_C = tl.load(rows_5BJT + plane + chunk + row_C)
        query_C = tl.load(rows_5BJT + 2 * plane + chunk + row_C)
        pull_C = tl.load(along_2BJT + chunk + row_C, strip == 0, 0.0)
        across = tl.load(across_BJN + bj * N + n)

        here = ((strip * parts + part) * tl.num_programs(1) + bj) * N + n
        if HAS_DECAY:
            carried = tl.sum(tl.sum(S_KV * dS_KV.to(tl.float32), 1), 0)
            tl.store(carried_PBJN + here, across * carried)
        S_low_KV = S_KV.to(PRODUCT)
        dq_CK = tl.dot(do_CV, tl.trans(S_low_KV)) * query_C[:, None]
        dq_CK = tl.dot(dP_CC, k_CK, dq_CK)
        dG_C = tl.sum(dq_CK * q_CK.to(tl.float32), 1)
        if UNIT_QUERIES:
            turn_C = tl.load(along_2BJT + plane + chunk + row_C, strip == 0, 0.0)
            dq_CK -= turn_C[:, None] * q_CK.to(tl.float32)
        dq_tile = tile(dq_SBTJK, first, J * K, row_C, key_K)
        tl.store(dq_tile, dq_CK.to(dq_SBTJK.dtype.element_ty), inside_C1)

        # k_t where its token reads, k_t S and rows of A; then where it is read too.
        dk_CK = tl.dot(dR_CV, tl.trans(S_low_KV)) * -read_C[:, None]
        dk_CK = tl.dot(dM_CC, k_CK, dk_CK)
        dG_C += 2 * tl.sum(dk_CK * k_CK.to(tl.float32), 1)
        kept_CK = tl.dot(U_CV, tl.trans(dS_KV)) * write_C[:, None]
        if HAS_DECAY:
            kept_tile = dG_2PBJT + strips * parts * plane + here * C + row_C
            tl.store(kept_tile, tl.sum(kept_CK * k_CK.to(tl.float32), 1))
        dk_CK = tl.dot(tl.trans(dP_CC), q_CK, dk_CK + kept_CK)
        dk_CK = tl.dot(tl.trans(dM_CC), k_CK, dk_CK)
        dG_C -= tl.sum(dk_CK * k_CK.to(tl.float32), 1)
        dk_CK -= pull_C[:, None] * k_CK.to(tl.float32)
        dk_tile = tile(dk_SBTJK, first, J * K, row_C, key_K)
        tl.store(dk_tile, dk_CK.to(dk_SBTJK.dtype.element_ty), inside_C1)

        k_KC = (k_KC.to(tl.float32) * write_C[None, :]).to(PRODUCT)
        S_KV = tl.dot(k_KC, U_CV, S_KV * across)
        if HAS_DECAY:
            tl.store(dG_2PBJT + here * C + row_C, dG_C)


@triton.jit
def decay_kernel(
    dG_2PBJT,
    carried_PBJN,
    document_T,
    dlog_decay_BTJ,
    T,
    plane,
    J: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """The log decay's gradient of one chunk and value head. G_t, the sum of log decays up to t,
    multiplies what t reads and divides what is read of it, <q, dq> + <k, dk'> - <k, dk''>, and at
    the chunk's end all that is kept: what was carried through it and what its tokens wrote."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    t_C = n * C + row_C
    dG_C = tl.zeros([C], tl.float32)
    kept_C = tl.zeros([C], tl.float32)
    kept = 0.0
    for part in tl.static_range(P):
        here = (part * tl.num_programs(1) + bj) * N + n
        dG_C += tl.load(dG_2PBJT + here * C + row_C)
        kept_C += tl.load(dG_2PBJT + P * plane + here * C + row_C)
        kept += tl.load(carried_PBJN + here)
    kept += tl.sum(kept_C, 0)
    dG_C += tl.where(t_C == tl.minimum(n * C + C, T) - 1, kept, 0.0)
    from_CC = row_C[:, None] >= row_C[None, :]
    if HAS_DOCUMENTS:
        document_T += b * T
        document_C = tl.load(document_T + t_C, t_C < T, -1)
        from_CC = from_CC & (document_C[:, None] == document_C[None, :])
    dg_C = tl.sum(tl.where(from_CC, dG_C[:, None], 0.0), 0)
    if HAS_DOCUMENTS:
        follows_C = (t_C < T) & (t_C + b > 0)
        before_C = tl.load(document_T + t_C - 1, follows_C, -1)
        dg_C = tl.where(follows_C & (document_C != before_C), 0.0, dg_C)
    tl.store(dlog_decay_BTJ + (b * T + t_C) * J + j, dg_C, t_C < T)
