"""The second half of the delta rule's backward on a GPU: what is left once the gradients of v and
of the states are known, chunk by chunk. The equations are in README.md.

Three kernels: one program of all would fill a multiprocessor's registers and wait for its loads
alone. Each takes the chunks from `begin` on; what is of these chunks alone is stored from there.
"""

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile


@triton.jit
def pairs_kernel(
    o_BTJV,
    U_BJNVC,
    do_BTJV,
    dv_BTJV,
    eta_BTJ,
    document_T,
    rows_7BJT,
    dP_BJTC,
    dM_BJTC,
    along_2BJT,
    deta_BTJ,
    scale,
    T,
    N,
    begin,
    plane,
    J: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of one chunk of one value head: the gradients dP of <q_i, k_j> and dM of <k_i, k_j>, as the
    products take them, of eta, and what the lengths take from dk and dq for each k and q: the step
    size's |k|^2, and |q| where q is normalised, as <q, dq> = <o, do>."""
    bj = tl.program_id(0).to(tl.int64)
    n = begin + tl.program_id(1)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    value_V = tl.arange(0, BLOCK_V)
    t_C = n * C + row_C
    inside_C = t_C < T
    first = b * T + n * C
    chunk = bj * N * C + n * C
    here = (bj * tl.num_programs(1) + tl.program_id(1)) * C
    here_plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * C
    # Before the tiles, so that no one waits for them at the end.
    gate_C = (b * T + t_C) * J + j
    # As prepare_kernel bounds it.
    eta_C = tl.maximum(tl.load(eta_BTJ + gate_C, inside_C, 1.0).to(tl.float32), 2.0**-40)
    r_C = tl.load(rows_7BJT + 3 * plane + chunk + row_C)
    unit_C = tl.load(rows_7BJT + 4 * plane + chunk + row_C)
    G_C = tl.load(rows_7BJT + 6 * plane + chunk + row_C)
    dP_CC = tl.zeros([C, C], tl.float32)
    dM_CC = tl.zeros([C, C], tl.float32)
    turn_CC = tl.zeros([C, C], tl.float32)
    for i_v in tl.range(0, V // BLOCK_V, num_stages=STAGES):
        value = j * V + i_v * BLOCK_V
        do_tile = tile(do_BTJV + value, first, J * V, row_C, value_V)
        dR_tile = tile(dv_BTJV + value, first, J * V, row_C, value_V)
        U_tile = tile(U_BJNVC, (bj * N + n) * V + i_v * BLOCK_V, C, value_V, row_C)
        do_CV = tl.load(do_tile, inside_C[:, None], 0.0)
        dR_CV = tl.load(dR_tile, inside_C[:, None], 0.0)
        U_VC = tl.load(U_tile).to(PRODUCT)
        if UNIT_QUERIES:
            # Of its product with o only the diagonal is asked for: no tile is in registers.
            o_tile = tile(o_BTJV + value, first, J * V, row_C, value_V)
            o_CV = tl.load(o_tile, inside_C[:, None], 0.0)
            turn_CC = tl.dot(do_CV.to(PRODUCT), tl.trans(o_CV.to(PRODUCT)), turn_CC)
        dP_CC = tl.dot(do_CV.to(PRODUCT), U_VC, dP_CC)
        dM_CC = tl.dot(dR_CV.to(PRODUCT), U_VC, dM_CC)
    rv_C = tl.full([C], 1.0, tl.float32)
    if STEP_SIZE != "learned":
        rv_C = tl.where(inside_C, r_C, 1.0)
    # What the step beta is worth: beta dbeta.
    diagonal_CC = row_C[:, None] == row_C[None, :]
    step_C = tl.sum(tl.where(diagonal_CC, dM_CC, 0.0), 1) / rv_C
    deta_C = step_C / eta_C
    pull_C = 2 * step_C * r_C * r_C
    if STEP_SIZE == "learned":
        pull_C = tl.zeros([C], tl.float32)
    elif STEP_SIZE == "longhorn":
        deta_C = deta_C * r_C * r_C
        pull_C = pull_C * eta_C
    tl.store(deta_BTJ + gate_C, deta_C, inside_C)
    tl.store(along_2BJT + here + row_C, pull_C)
    turn_C = tl.sum(tl.where(diagonal_CC, turn_CC, 0.0), 1) * unit_C * unit_C
    tl.store(along_2BJT + here_plane + here + row_C, turn_C)

    upto_CC = row_C[:, None] >= row_C[None, :]
    if HAS_DOCUMENTS:
        document_T += b * T
        document_C = tl.load(document_T + t_C, inside_C, -1)
        upto_CC = upto_CC & (document_C[:, None] == document_C[None, :])
    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf")))
    decay_CC = decay_CC * (eta_C * r_C)[None, :]
    pair_CC = row_C[:, None] * C + row_C[None, :]
    dP_CC = dP_CC * decay_CC * (unit_C * scale)[:, None]
    tl.store(dP_BJTC + here * C + pair_CC, dP_CC.to(dP_BJTC.dtype.element_ty))
    dM_CC = dM_CC * decay_CC * (-r_C / rv_C)[:, None]
    dM_CC = tl.where(row_C[:, None] > row_C[None, :], dM_CC, 0.0)
    tl.store(dM_BJTC + here * C + pair_CC, dM_CC.to(dM_BJTC.dtype.element_ty))


@triton.jit
def states_kernel(
    k_BTHK,
    U_BJNVC,
    rows_7BJT,
    across_BJN,
    kept_BJGVK,
    states_BJNVK,
    T,
    N,
    begin,
    count,
    plane,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    STATE_EVERY: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state before each of STATE_EVERY chunks of one value head from the one that was kept;
    BLOCK_K of its rows and BLOCK_V of its columns, which do not know of the others."""
    columns: tl.constexpr = V // BLOCK_V
    part = tl.program_id(0) // columns
    bj = tl.program_id(1).to(tl.int64)
    group = tl.program_id(2)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = part * BLOCK_K + tl.arange(0, BLOCK_K)
    value_V = (tl.program_id(0) % columns) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_BTHK += (j // (J // H)) * K
    kept = (bj * tl.cdiv(N, STATE_EVERY) + begin // STATE_EVERY + group) * V
    S_VK = tl.load(tile(kept_BJGVK, kept, K, value_V, key_K)).to(tl.float32)
    start = group * STATE_EVERY
    for m in tl.range(start, tl.minimum(start + STATE_EVERY, count), num_stages=STAGES):
        n = begin + m
        first = b * T + n * C
        inside_C1 = (row_C < T - n * C)[:, None]
        k_CK = tl.load(tile(k_BTHK, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
        U_VC = tl.load(tile(U_BJNVC, (bj * N + n) * V, C, value_V, row_C))
        write_C = tl.load(rows_7BJT + plane + bj * N * C + n * C + row_C)
        across = tl.load(across_BJN + bj * N + n)
        S_tile = tile(states_BJNVK, (bj * count + m) * V, K, value_V, key_K)
        tl.store(S_tile, S_VK.to(states_BJNVK.dtype.element_ty))
        write_VC = (U_VC.to(tl.float32) * write_C[None, :]).to(PRODUCT)
        S_VK = tl.dot(write_VC, k_CK, S_VK * across)


@triton.jit
def gradient_kernel(
    q_BTHK,
    k_BTHK,
    U_BJNVC,
    do_BTJV,
    dv_BTJV,
    document_T,
    rows_7BJT,
    across_BJN,
    states_BJNVK,
    dstates_BJNVK,
    dP_BJTC,
    dM_BJTC,
    along_2BJT,
    dq_BTJK,
    dk_BTJK,
    dlog_decay_PBTJ,
    T,
    N,
    begin,
    plane,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_K columns of the gradients of q and k of one chunk and value head, and what these
    columns add to the log decay's: from dP, dM, the state before the chunk, the gradient of the
    state after it, U, and its gradient's solution dR, which is v's gradient."""
    blocks: tl.constexpr = K // BLOCK_K
    part = tl.program_id(0) % blocks
    bj = (tl.program_id(0) // blocks).to(tl.int64)
    n = begin + tl.program_id(1)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = part * BLOCK_K + tl.arange(0, BLOCK_K)
    value_V = tl.arange(0, BLOCK_V)
    q_BTHK += (j // (J // H)) * K
    k_BTHK += (j // (J // H)) * K
    first = b * T + n * C
    chunk = bj * N * C + n * C
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    here = bj * tl.num_programs(1) + tl.program_id(1)
    here_plane = (tl.num_programs(0) // blocks).to(tl.int64) * tl.num_programs(1) * C
    dq_CK = tl.zeros([C, BLOCK_K], tl.float32)
    dk_CK = tl.zeros([C, BLOCK_K], tl.float32)
    kept_CK = tl.zeros([C, BLOCK_K], tl.float32)
    carried_V = tl.zeros([BLOCK_V], tl.float32)
    for i_v in tl.range(0, V // BLOCK_V, num_stages=STAGES):
        value = here * V + i_v * BLOCK_V
        S_VK = tl.load(tile(states_BJNVK, value, K, value_V, key_K)).to(PRODUCT)
        dS_VK = tl.load(tile(dstates_BJNVK, value, K, value_V, key_K)).to(PRODUCT)
        U_tile = tile(U_BJNVC, (bj * N + n) * V + i_v * BLOCK_V, C, value_V, row_C)
        U_VC = tl.load(U_tile).to(PRODUCT)
        value = j * V + i_v * BLOCK_V
        do_CV = tl.load(tile(do_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0)
        dR_CV = tl.load(tile(dv_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0)
        if HAS_DECAY:
            carried_V += tl.sum(S_VK.to(tl.float32) * dS_VK.to(tl.float32), 1)
        dq_CK = tl.dot(do_CV.to(PRODUCT), S_VK, dq_CK)
        dk_CK = tl.dot(dR_CV.to(PRODUCT), S_VK, dk_CK)
        kept_CK = tl.dot(tl.trans(U_VC), dS_VK, kept_CK)

    k_CK = tl.load(tile(k_BTHK, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    q_CK = tl.load(tile(q_BTHK, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    dP_CC = tl.load(tile(dP_BJTC, here * C, C, row_C, row_C)).to(PRODUCT)
    dM_CC = tl.load(tile(dM_BJTC, here * C, C, row_C, row_C)).to(PRODUCT)
    read_C = tl.load(rows_7BJT + chunk + row_C)
    write_C = tl.load(rows_7BJT + plane + chunk + row_C)
    query_C = tl.load(rows_7BJT + 2 * plane + chunk + row_C)
    dq_CK = tl.dot(dP_CC, k_CK, dq_CK * query_C[:, None])
    dG_C = tl.sum(dq_CK * q_CK.to(tl.float32), 1)
    if UNIT_QUERIES:
        turn_C = tl.load(along_2BJT + here_plane + here * C + row_C)
        dq_CK -= turn_C[:, None] * q_CK.to(tl.float32)
    dq_tile = tile(dq_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dq_tile, dq_CK.to(dq_BTJK.dtype.element_ty), inside_C1)

    # k_t where its token reads, rows of A and k_t S; then where it is read too.
    dk_CK = tl.dot(dM_CC, k_CK, dk_CK * -read_C[:, None])
    reads_C = tl.sum(dk_CK * k_CK.to(tl.float32), 1)
    kept_CK = kept_CK * write_C[:, None]
    kept_C = tl.sum(kept_CK * k_CK.to(tl.float32), 1)
    dk_CK = tl.dot(tl.trans(dP_CC), q_CK, dk_CK + kept_CK)
    dk_CK = tl.dot(tl.trans(dM_CC), k_CK, dk_CK)
    both_C = tl.sum(dk_CK * k_CK.to(tl.float32), 1)
    pull_C = tl.load(along_2BJT + here * C + row_C)
    dk_CK -= pull_C[:, None] * k_CK.to(tl.float32)
    dk_tile = tile(dk_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk_BTJK.dtype.element_ty), inside_C1)
    if HAS_DECAY:
        # G_t, the sum of log decays up to t, multiplies what t reads and divides what is read of t.
        whole = tl.load(across_BJN + bj * N + n) * tl.sum(carried_V, 0) + tl.sum(kept_C, 0)
        dG_C += 2 * reads_C - both_C
        dG_C += tl.where(t_C == tl.minimum(n * C + C, T) - 1, whole, 0.0)
        if HAS_DOCUMENTS:
            document_T += b * T
            document_C = tl.load(document_T + t_C, t_C < T, -1)
            from_CC = document_C[:, None] == document_C[None, :]
            from_CC = from_CC & (row_C[:, None] >= row_C[None, :])
            dg_C = tl.sum(tl.where(from_CC, dG_C[:, None], 0.0), 0)
            follows_C = (t_C < T) & (t_C + b > 0)
            before_C = tl.load(document_T + t_C - 1, follows_C, -1)
            dg_C = tl.where(follows_C & (document_C != before_C), 0.0, dg_C)
        else:
            dg_C = tl.cumsum(dG_C, 0, reverse=True)
        tokens = (tl.num_programs(0) // blocks).to(tl.int64) // J * T
        gate_C = (part * tokens + b * T + t_C) * J + j
        tl.store(dlog_decay_PBTJ + gate_C, dg_C, t_C < T)
