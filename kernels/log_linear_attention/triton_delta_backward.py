"""Log-linear attention on the gated delta base, backward on a GPU: the states' gradients by a scan
from the end, then those of the chunks' maps, then through these to everything else. The equations
are in README.md.
"""

# Loads have no type outside of a kernel.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.log_linear_attention.triton_delta_forward import load_lambda
from mixtron.kernels.log_linear_attention.triton_forward import load_chunk, of_level
from mixtron.kernels.triton_tools import tile


@triton.jit(do_not_specialize=["T", "N", "LIVE", "low", "high", "ARRIVING", "LEAVING"])
def log_linear_delta_reverse_scan_kernel(
    do_BTJV,
    lambda_BTJL,
    Z_BJNCK,
    E_BJNKK,
    cumulative_BJNC,
    chunk_N4,
    live_N,
    following_N,
    group_R2,
    arrival_N,
    darriving_BJAKV,
    departure_N,
    dleaving_BJAKV,
    dnodes_BJRMKV,
    dstates_BJSKV,
    dwrite_BJNKV,
    T,
    N,
    LIVE,
    low,
    high,
    ARRIVING,
    LEAVING,
    L: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """The gradients of what the nodes of bits low .. high - 1 before every chunk of a group become
    by passing it; and of what it writes (LOWEST), or of the nodes that the bits below leave. Of
    BLOCK_V columns."""
    column = tl.program_id(0) * BLOCK_V
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    nodes = (bj * tl.num_programs(2) + tl.program_id(2)) * (high - low)
    dnode_at = dnodes_BJRMKV + column
    group = group_R2 + tl.program_id(2) * 2
    first_chunk, end_chunk = tl.load(group), tl.load(group + 1)
    for step in range(end_chunk - first_chunk):
        n = end_chunk - 1 - step
        first, begin, end, number = load_chunk(chunk_N4, n)
        carry = (number + 1) & -(number + 1)
        arrives = carry >= (1 << low)
        held = (number >> low) & ((1 << (high - low)) - 1)
        if (held != 0) | arrives:
            chunk = bj * N + n
            first += b * T
            inside_C = (row_C >= begin) & (row_C < end)
            do_tile = tile(do_BTJV + j * V + column, first, J * V, row_C, value_V)
            do_CV = tl.load(do_tile, inside_C[:, None], 0.0).to(tl.float32)
            Z_CK = tl.load(tile(Z_BJNCK, chunk * C, K, row_C, key_K)).to(PRODUCT)
            E_KK = tl.load(tile(E_BJNKK, chunk * K, K, key_K, key_K)).to(PRODUCT)
            across = tl.exp(tl.load(cumulative_BJNC + chunk * C + C - 1))
            goes_on = tl.load(following_N + n) > 0
            lambda_at = lambda_BTJL + ((first + row_C) * J + j) * L
            live = tl.load(live_N + n)
            for m in range(low):
                live += (number >> m) & 1
            dmerged_KV = tl.zeros([K, BLOCK_V], tl.float32)
            if arrives:
                target = 0
                for m in range(high - low - 1):
                    target += ((1 << (low + m)) < carry).to(tl.int32)
                dmerged_at = tile(dnode_at, (nodes + target) * K, V, key_K, value_V)
                known = goes_on
                if not HIGHEST:  # noqa: SIM102 (a constant and a value)
                    if carry >= (1 << high):
                        at = (bj * LEAVING + tl.load(departure_N + n)) * K
                        dmerged_at = tile(dleaving_BJAKV + column, at, V, key_K, value_V)
                        known = True
                dmerged_KV = tl.where(known, tl.load(dmerged_at), 0.0)
                if LOWEST:
                    written = tile(dwrite_BJNKV + column, chunk * K, V, key_K, value_V)
                    tl.store(written, dmerged_KV.to(dwrite_BJNKV.dtype.element_ty))
                else:
                    at = (bj * ARRIVING + tl.load(arrival_N + n)) * K
                    tl.store(tile(darriving_BJAKV + column, at, V, key_K, value_V), dmerged_KV)
            for m in range(high - low):
                if ((held >> m) & 1) != 0:
                    pointers = tile(dnode_at, (nodes + m) * K, V, key_K, value_V)
                    dS_KV = dmerged_KV
                    if (1 << (low + m)) >= carry:
                        dS_KV = tl.where(goes_on, tl.load(pointers), 0.0)
                    low_KV = dS_KV.to(PRODUCT)
                    state = tile(dstates_BJSKV + column, (bj * LIVE + live) * K, V, key_K, value_V)
                    tl.store(state, low_KV.to(dstates_BJSKV.dtype.element_ty))
                    lambda_C = load_lambda(lambda_at, 7 + low + m, inside_C, L)
                    read_CV = (do_CV * lambda_C[:, None]).to(PRODUCT)
                    dS_KV = across * dS_KV - tl.dot(tl.trans(E_KK), low_KV)
                    dS_KV = tl.dot(tl.trans(Z_CK), read_CV, dS_KV)
                    tl.store(pointers, dS_KV)
                    live += 1
            # Other threads read it next.
            tl.debug_barrier()


@triton.jit(do_not_specialize=["M", "LIVE"])
def log_linear_delta_transition_gradient_kernel(
    states_BJSKV,
    dstates_BJSKV,
    chunk_N4,
    live_N,
    dE_BJNKK,
    dacross_BJN,
    M,
    LIVE,
    K: tl.constexpr,
    V: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and value head, over the nodes that pass it."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    number = tl.load(chunk_N4 + n * 4 + 3)
    live = tl.load(live_N + n)
    dE_KK = tl.zeros([K, K], tl.float32)
    dacross = 0.0
    for m in range(M):
        if (number & (1 << m)) != 0:
            at = (bj * LIVE + live) * K
            S_KV = tl.load(tile(states_BJSKV, at, V, key_K, value_V)).to(PRODUCT)
            dS_KV = tl.load(tile(dstates_BJSKV, at, V, key_K, value_V)).to(PRODUCT)
            dE_KK += tl.dot(dS_KV, tl.trans(S_KV))
            dacross += tl.sum(tl.sum(S_KV.to(tl.float32) * dS_KV.to(tl.float32), 1), 0)
            live += 1
    pointers = tile(dE_BJNKK, (bj * N + n) * K, K, key_K, key_K)
    tl.store(pointers, (-dE_KK).to(dE_BJNKK.dtype.element_ty))
    tl.store(dacross_BJN + bj * N + n, dacross)


@triton.jit(do_not_specialize=["T", "M", "LIVE"])
def log_linear_delta_read_gradient_kernel(
    v_BTJV,
    do_BTJV,
    lambda_BTJL,
    M_BJNCC,
    Z_BJNCK,
    Y_BJNCK,
    states_BJSKV,
    dwrite_BJNKV,
    chunk_N4,
    live_N,
    dv_BTJV,
    dlambda_BTJL,
    dM_BJNCC,
    dZ_BJNCK,
    dY_BJNCK,
    T,
    M,
    LIVE,
    L: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and value head: dv, dlambda, dM, dZ and dY (by what the chunk writes)."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    chunk = bj * N + n
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    first, begin, end, number = load_chunk(chunk_N4, n)
    first += b * T
    inside_C = (row_C >= begin) & (row_C < end)
    inside_C1 = inside_C[:, None]
    value = j * V
    do_CV = tl.load(tile(do_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
    level_0_C = ((first + row_C) * J + j) * L
    lambda_at = lambda_BTJL + level_0_C
    low = dZ_BJNCK.dtype.element_ty

    Z_CK = tl.load(tile(Z_BJNCK, chunk * C, K, row_C, key_K)).to(tl.float32)
    dZ_CK = tl.zeros([C, K], tl.float32)
    live = tl.load(live_N + n)
    for m in range(M):
        dlambda_C = tl.zeros([C], tl.float32)
        if (number & (1 << m)) != 0:
            state = tile(states_BJSKV, (bj * LIVE + live) * K, V, key_K, value_V)
            dread_CK = tl.dot(do_CV, tl.trans(tl.load(state).to(PRODUCT)))
            dlambda_C = tl.sum(dread_CK * Z_CK, 1)
            dZ_CK += dread_CK * load_lambda(lambda_at, 7 + m, inside_C, L)[:, None]
            live += 1
        tl.store(dlambda_BTJL + level_0_C + 7 + m, dlambda_C, inside_C & (7 + m < L))
    tl.store(tile(dZ_BJNCK, chunk * C, K, row_C, key_K), dZ_CK.to(low))

    v_CV = tl.load(tile(v_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
    M_CC = tl.load(tile(M_BJNCC, chunk * C, C, row_C, row_C)).to(tl.float32)
    dM_CC = tl.dot(do_CV, tl.trans(v_CV))
    distance_CC = row_C[:, None] ^ row_C[None, :]
    upto_CC = row_C[:, None] >= row_C[None, :]
    seen_CC = tl.where(upto_CC, dM_CC * M_CC, 0.0)
    for level in tl.static_range(0, 7):
        lambda_C = load_lambda(lambda_at, level, inside_C, L)
        of_level_CC = of_level(distance_CC, level)
        dlambda_C = tl.sum(tl.where(of_level_CC, seen_CC, 0.0), 1)
        tl.store(dlambda_BTJL + level_0_C + level, dlambda_C, inside_C & (level < L))
        dM_CC = tl.where(of_level_CC, dM_CC * lambda_C[:, None], dM_CC)
        M_CC = tl.where(of_level_CC, M_CC * lambda_C[:, None], M_CC)
    dM_CC = tl.where(upto_CC, dM_CC, 0.0)
    tl.store(tile(dM_BJNCC, chunk * C, C, row_C, row_C), dM_CC.to(low))

    dwrite_KV = tl.load(tile(dwrite_BJNKV, chunk * K, V, key_K, value_V)).to(PRODUCT)
    Y_CK = tl.load(tile(Y_BJNCK, chunk * C, K, row_C, key_K)).to(PRODUCT)
    dv_CV = tl.dot(Y_CK, dwrite_KV)
    dv_CV = tl.dot(tl.trans(M_CC.to(PRODUCT)), do_CV, dv_CV)
    dv_tile = tile(dv_BTJV + value, first, J * V, row_C, value_V)
    tl.store(dv_tile, dv_CV.to(dv_BTJV.dtype.element_ty), inside_C1)
    dY_CK = tl.dot(v_CV, tl.trans(dwrite_KV))
    tl.store(tile(dY_BJNCK, chunk * C, K, row_C, key_K), dY_CK.to(low))


@triton.jit(do_not_specialize=["T"])
def log_linear_delta_maps_gradient_kernel(
    q_BTHK,
    k_BTHK,
    beta_BTJ,
    cumulative_BJNC,
    X_BJNCC,
    M_BJNCC,
    Y_BJNCK,
    dM_BJNCC,
    dZ_BJNCK,
    dY_BJNCK,
    dE_BJNKK,
    dacross_BJN,
    chunk_N4,
    dq_BTJK,
    dk_BTJK,
    dlog_decay_BTJ,
    dbeta_BTJ,
    scale,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and value head: dq, dk and the gradients of log decay and beta, by the maps'."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    chunk = bj * N + n
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    first, begin, end, _ = load_chunk(chunk_N4, n)
    first += b * T
    inside_C = (row_C >= begin) & (row_C < end)
    inside_C1 = inside_C[:, None]
    head = (j // (J // H)) * K
    k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    G_C = tl.load(cumulative_BJNC + chunk * C + row_C)
    total = tl.load(cumulative_BJNC + chunk * C + C - 1)
    gate_C = (first + row_C) * J + j
    beta_C = tl.load(beta_BTJ + gate_C, inside_C, 1.0).to(tl.float32)
    weight_C = tl.maximum(beta_C, 2.0**-40)
    from_start_C1 = tl.exp(G_C)[:, None]
    to_end_C1 = tl.exp(total - G_C)[:, None]

    # E = Y^T seen, Z = from_start scale q - M seen.
    seen_CK = (k_CK.to(tl.float32) * from_start_C1).to(PRODUCT)
    dE_KK = tl.load(tile(dE_BJNKK, chunk * K, K, key_K, key_K)).to(PRODUCT)
    dZ_CK = tl.load(tile(dZ_BJNCK, chunk * C, K, row_C, key_K)).to(PRODUCT)
    Y_CK = tl.load(tile(Y_BJNCK, chunk * C, K, row_C, key_K)).to(PRODUCT)
    M_CC = tl.load(tile(M_BJNCC, chunk * C, C, row_C, row_C)).to(PRODUCT)
    dseen_CK = tl.dot(Y_CK, dE_KK) - tl.dot(tl.trans(M_CC), dZ_CK)
    dk_CK = dseen_CK * from_start_C1
    dG_C = tl.sum(dk_CK * k_CK.to(tl.float32), 1)
    dY_CK = tl.load(tile(dY_BJNCK, chunk * C, K, row_C, key_K)).to(tl.float32)
    dY_CK = (dY_CK + tl.dot(seen_CK, tl.trans(dE_KK))).to(PRODUCT)
    dM_CC = tl.load(tile(dM_BJNCC, chunk * C, C, row_C, row_C)).to(tl.float32)
    dM_CC = (dM_CC - tl.dot(dZ_CK, tl.trans(seen_CK))).to(PRODUCT)

    # Y = X^T kept.
    X_CC = tl.load(tile(X_BJNCC, chunk * C, C, row_C, row_C)).to(PRODUCT)
    dkept_CK = tl.dot(X_CC, dY_CK) * to_end_C1
    dk_CK += dkept_CK
    kept_C = tl.sum(dkept_CK * k_CK.to(tl.float32), 1)
    dG_C -= kept_C
    kept_CK = (k_CK.to(tl.float32) * to_end_C1).to(PRODUCT)
    dX_CC = tl.dot(kept_CK, tl.trans(dY_CK))

    # M = P X, and P.
    q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    upto_CC = row_C[:, None] >= row_C[None, :]
    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf")))
    P_CC = tl.dot(q_CK, tl.trans(k_CK)) * decay_CC * scale
    dX_CC = tl.dot(tl.trans(P_CC.to(PRODUCT)), dM_CC, dX_CC)
    dP_CC = tl.dot(dM_CC, tl.trans(X_CC))
    dG_CC = dP_CC * P_CC
    dq_CK = dZ_CK.to(tl.float32) * (from_start_C1 * scale)
    dG_C += tl.sum(dq_CK * q_CK.to(tl.float32), 1)
    dP_low_CC = (dP_CC * decay_CC * scale).to(PRODUCT)
    dq_CK = tl.dot(dP_low_CC, k_CK, dq_CK)
    dk_CK = tl.dot(tl.trans(dP_low_CC), q_CK, dk_CK)
    dq_tile = tile(dq_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dq_tile, dq_CK.to(dq_BTJK.dtype.element_ty), inside_C1)

    # X = (I + A)^-1 diag(beta), A_ij = beta_i decay_ij <k_i, k_j>.
    dbeta_C = tl.sum(dX_CC * X_CC.to(tl.float32), 0) / weight_C
    dA_CC = tl.dot(tl.trans(X_CC), dX_CC.to(PRODUCT))
    dA_CC = tl.dot(dA_CC.to(PRODUCT), tl.trans(X_CC))
    below_CC = row_C[:, None] > row_C[None, :]
    dA_CC = tl.where(below_CC, -dA_CC / weight_C[:, None], 0.0) * decay_CC
    seen_CC = dA_CC * tl.dot(k_CK, tl.trans(k_CK))
    dbeta_C += tl.sum(seen_CC, 1)
    dG_CC += seen_CC * beta_C[:, None]
    dA_CC = dA_CC * beta_C[:, None]
    dk_CK = tl.dot((dA_CC + tl.trans(dA_CC)).to(PRODUCT), k_CK, dk_CK)
    dk_tile = tile(dk_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk_BTJK.dtype.element_ty), inside_C1)
    tl.store(dbeta_BTJ + gate_C, dbeta_C, inside_C)

    dG_C += tl.sum(dG_CC, 1) - tl.sum(dG_CC, 0)
    passed = tl.exp(total) * tl.load(dacross_BJN + chunk)
    dG_C += tl.where(row_C == C - 1, tl.sum(kept_C, 0) + passed, 0.0)
    dg_C = tl.sum(tl.where(upto_CC, dG_C[:, None], 0.0), 0)
    tl.store(dlog_decay_BTJ + gate_C, dg_C, inside_C)
