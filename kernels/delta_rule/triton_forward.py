"""The delta rule's forward on a GPU: what does not depend on the state chunk by chunk, then one
scan over the chunks. The equations are in README.md.

Tensor cores take the tiles of q, k and v as they come. Norms, step sizes and decays are in the
two [C, C] matrices of a chunk, X = (I + A)^-1 and P, and in row factors:

    U = X rv (v - read k S),   o = query q S + P U,   S' = across S + k^T (write U)

Step sizes are factors of what a token leaves behind: of the columns of A and P, and of `write`. So
X has a diagonal of ones, which bf16 holds exactly. Another would be off by its own rounding, and
with it a whole row of U, which no sum over V averages out.
"""

# Pyright takes Triton's `range` to raise.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile, unit_lower_inverse


@triton.jit
def prepare_kernel(
    q_BTHK,
    k_BTHK,
    log_decay_BTJ,
    eta_BTJ,
    document_T,
    X_BJTC,
    P_BJTC,
    rows_7BJT,
    across_BJN,
    scale,
    eps,
    T,
    plane,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    STEP_SIZE: tl.constexpr,
    UNIT_QUERIES: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and value head: X, P, the row factors read, write, query and rv, the decay
    across the chunk, and for backward r, 1 / |q| and the sum of log decays up to each token."""
    bj = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    N = tl.num_programs(1)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    t_C = n * C + row_C
    inside_C = t_C < T
    last = tl.minimum(n * C + C, T) - 1 - n * C
    gate_C = (b * T + t_C) * J + j
    # Not 0: backward divides by it.
    eta_C = tl.maximum(tl.load(eta_BTJ + gate_C, mask=inside_C, other=0.0).to(tl.float32), 2.0**-40)

    upto_CC = row_C[:, None] >= row_C[None, :]
    reached_C = inside_C
    ends_C = inside_C
    if HAS_DOCUMENTS:
        document_T += b * T
        document_C = tl.load(document_T + t_C, mask=inside_C, other=-1)
        before_C = tl.load(document_T + t_C - 1, mask=inside_C & (t_C + b > 0), other=0)
        upto_CC = upto_CC & (document_C[:, None] == document_C[None, :])
        # Rows follow on each other: the token before the first of all is itself.
        before = tl.maximum(b * T + n * C - 1, 0) - b * T
        reached_C = reached_C & (document_C == tl.load(document_T + before))
        ends_C = ends_C & (document_C == tl.load(document_T + n * C + last))
    G_C = tl.zeros([C], tl.float32)
    if HAS_DECAY:
        g_C = tl.load(log_decay_BTJ + gate_C, mask=inside_C, other=0.0).to(tl.float32)
        # Beyond that nothing is left, and larger sums would cost the others their precision.
        g_C = tl.maximum(g_C, -64.0)
        if HAS_DOCUMENTS:
            g_C = tl.where((document_C != before_C) & (t_C + b > 0), 0.0, g_C)
            G_C = tl.sum(tl.where(upto_CC, g_C[None, :], 0.0), 1)
        else:
            G_C = tl.cumsum(g_C, 0)
    G_last = tl.sum(tl.where(row_C == last, G_C, 0.0), 0)
    from_start_C = tl.where(reached_C, tl.exp(G_C), 0.0)
    to_end_C = tl.where(ends_C, tl.exp(G_last - G_C), 0.0)
    across = tl.exp(G_last)
    if HAS_DOCUMENTS:
        goes_on = tl.load(document_T + before) == tl.load(document_T + n * C + last)
        across = tl.where(goes_on, across, 0.0)

    first = b * T + n * C
    head = (j // (J // H)) * K
    k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C[:, None], 0.0)
    k_CK = k_CK.to(PRODUCT)
    A_CC = tl.dot(k_CK, tl.trans(k_CK))
    # Of a product with itself only the diagonal: a tile of fp32 keys would fill the registers.
    diagonal_CC = row_C[:, None] == row_C[None, :]
    norm2_C = tl.sum(tl.where(diagonal_CC, A_CC, 0.0), 1)
    r_C, rv_C = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
    if STEP_SIZE == "kaczmarz":
        r_C = 1 / tl.sqrt(norm2_C + eps)
        rv_C = r_C
    elif STEP_SIZE == "longhorn":
        r_C = 1 / tl.sqrt(1 + eta_C * norm2_C)
        rv_C = r_C

    step_C = eta_C * r_C
    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf")))
    A_CC = A_CC * (decay_CC * step_C[None, :]) * r_C[:, None]
    A_CC = tl.where(row_C[:, None] > row_C[None, :], A_CC, 0.0)
    # A's entries are <k'_i, k'_j> eta_j: with keys and steps below 1, so are they.
    X_CC = unit_lower_inverse(A_CC, tl.float32 if PRODUCT is tl.float32 else tl.float16)
    pair_CC = (bj * N * C + n * C) * C + (row_C[:, None] * C + row_C[None, :])
    tl.store(X_BJTC + pair_CC, X_CC.to(X_BJTC.dtype.element_ty))

    # Only now, so that P and q are not held in registers through the inversion.
    q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C[:, None], 0.0)
    q_CK = q_CK.to(PRODUCT)
    unit_C = tl.where(inside_C, 1.0, 0.0)
    if UNIT_QUERIES:
        own_CC = tl.dot(q_CK, tl.trans(q_CK))
        length_C = tl.sqrt(tl.sum(tl.where(diagonal_CC, own_CC, 0.0), 1))
        unit_C = unit_C / tl.maximum(length_C, 1e-12)
    P_CC = tl.dot(q_CK, tl.trans(k_CK)) * (unit_C * scale)[:, None]
    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf")))
    P_CC *= decay_CC * step_C[None, :]
    tl.store(P_BJTC + pair_CC, P_CC.to(P_BJTC.dtype.element_ty))
    factor = rows_7BJT + bj * N * C + n * C + row_C
    tl.store(factor, from_start_C * r_C / rv_C)
    tl.store(factor + plane, to_end_C * step_C)
    tl.store(factor + 2 * plane, from_start_C * unit_C * scale)
    tl.store(factor + 3 * plane, tl.where(inside_C, r_C, 0.0))
    tl.store(factor + 4 * plane, unit_C)
    tl.store(factor + 5 * plane, rv_C)
    tl.store(factor + 6 * plane, G_C)
    tl.store(across_BJN + bj * N + n, across)


@triton.jit
def scan_kernel(
    q_BTHK,
    k_BTHK,
    v_BTJV,
    X_BJTC,
    P_BJTC,
    rows_7BJT,
    across_BJN,
    initial_BJKV,
    o_BTJV,
    U_BJNVC,
    states_BJNVK,
    final_BJKV,
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
    HAS_INITIAL: tl.constexpr,
    TRAINING: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All chunks of one value head and BLOCK_V of its columns, one after another. For backward it
    keeps U, and the state before every STATE_EVERY-th chunk."""
    column = tl.program_id(0) * BLOCK_V
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    head = (j // (J // H)) * K
    S_VK = tl.zeros([BLOCK_V, K], tl.float32)
    if HAS_INITIAL:
        S_VK = tl.trans(
            tl.load(tile(initial_BJKV + column, bj * K, V, key_K, value_V)).to(tl.float32)
        )
    for n in tl.range(0, N, num_stages=STAGES):
        first = b * T + n * C
        chunk = bj * N * C + n * C
        inside_C1 = (row_C < T - n * C)[:, None]
        k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
        q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
        v_tile = tile(v_BTJV + j * V + column, first, J * V, row_C, value_V)
        # The second condition always holds: with it fewer registers are spilled.
        v_CV = tl.load(v_tile, inside_C1 & (column < V), 0.0)
        X_CC = tl.load(tile(X_BJTC, chunk, C, row_C, row_C))
        P_CC = tl.load(tile(P_BJTC, chunk, C, row_C, row_C))
        # Row factors are loaded where they are used: there are few registers.
        across = tl.load(across_BJN + bj * N + n)
        k_CK = k_CK.to(PRODUCT)
        S_low_VK = S_VK.to(PRODUCT)
        if TRAINING:  # noqa: SIM102 (a constant and a value)
            if n % STATE_EVERY == 0:
                stored = (bj * tl.cdiv(N, STATE_EVERY) + n // STATE_EVERY) * V + column
                S_tile = tile(states_BJNVK, stored, K, value_V, key_K)
                tl.store(S_tile, S_low_VK.to(states_BJNVK.dtype.element_ty))
        read_C = tl.load(rows_7BJT + chunk + row_C)
        R_VC = tl.dot(S_low_VK, tl.trans(k_CK)) * -read_C[None, :]
        rv_C = tl.load(rows_7BJT + 5 * plane + chunk + row_C)
        R_VC = (tl.trans(v_CV).to(tl.float32) + R_VC) * rv_C[None, :]
        U_VC = tl.dot(R_VC.to(PRODUCT), tl.trans(X_CC.to(PRODUCT)))
        if TRAINING:
            U_tile = tile(U_BJNVC, (bj * N + n) * V + column, C, value_V, row_C)
            tl.store(U_tile, U_VC.to(U_BJNVC.dtype.element_ty))
        o_VC = tl.dot(S_low_VK, tl.trans(q_CK.to(PRODUCT)))
        query_C = tl.load(rows_7BJT + 2 * plane + chunk + row_C)
        o_VC *= query_C[None, :]
        o_VC = tl.dot(U_VC.to(PRODUCT), tl.trans(P_CC.to(PRODUCT)), o_VC)
        o_tile = tile(o_BTJV + j * V + column, first, J * V, row_C, value_V)
        tl.store(o_tile, tl.trans(o_VC.to(o_BTJV.dtype.element_ty)), inside_C1)
        write_C = tl.load(rows_7BJT + plane + chunk + row_C)
        write_VC = (U_VC * write_C[None, :]).to(PRODUCT)
        S_VK = tl.dot(write_VC, k_CK, S_VK * across)
    tl.store(tile(final_BJKV + column, bj * K, V, key_K, value_V), tl.trans(S_VK))


@triton.jit
def piece_maps_kernel(
    k_BTE,
    v_BTJV,
    X_RC,
    rows_7BJT,
    across_BJN,
    initial_BJKV,
    maps_BJKE,
    N,
    plane,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of each piece of a sequence, which is a row of its own here, BLOCK_V columns of its map
    [h | M]: where the scan ends that begins at [0 | I] with the values [v | 0]. None is needed of
    the last piece, and of the first only what becomes of the initial state, in the place of h.

    k, v and X, its rows those of all chunks after each other, are tensor descriptors: their
    addresses take no registers, and beyond the last token and the last value there is 0."""
    column = tl.program_id(0) * BLOCK_V
    bj = tl.program_id(1)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    S_VK = (key_K[None, :] == (column - V + value_V)[:, None]).to(tl.float32)
    piece = b % PIECES
    if HAS_INITIAL:
        begins = ((b // PIECES) * J + j).to(tl.int64) * K
        S_tile = tile(initial_BJKV + column, begins, V, key_K, value_V)
        own = (piece == 0) & (column + value_V < V)
        S_VK += tl.trans(tl.load(S_tile, own[None, :], 0.0).to(tl.float32))
    needed = ((piece > 0) | (column < V)) & (piece < PIECES - 1)
    for n in tl.range(0, tl.where(needed, N, 0), num_stages=STAGES):
        chunk = (bj * N + n) * C
        k_CK = k_BTE.load([b, n * C, (j // (J // H)) * K]).reshape(C, K).to(PRODUCT)
        v_CV = v_BTJV.load([b, n * C, j, column]).reshape(C, BLOCK_V)
        X_CC = X_RC.load([chunk, 0]).to(PRODUCT)
        across = tl.load(across_BJN + bj * N + n)
        read_C = tl.load(rows_7BJT + chunk + row_C)
        R_VC = tl.dot(S_VK.to(PRODUCT), tl.trans(k_CK)) * -read_C[None, :]
        rv_C = tl.load(rows_7BJT + 5 * plane + chunk + row_C)
        R_VC = (tl.trans(v_CV).to(tl.float32) + R_VC) * rv_C[None, :]
        U_VC = tl.dot(R_VC.to(PRODUCT), tl.trans(X_CC))
        write_C = tl.load(rows_7BJT + plane + chunk + row_C)
        S_VK = tl.dot((U_VC * write_C[None, :]).to(PRODUCT), k_CK, S_VK * across)
    maps_tile = tile(maps_BJKE + column, bj.to(tl.int64) * K, V + K, key_K, value_V)
    tl.store(maps_tile, tl.trans(S_VK))
