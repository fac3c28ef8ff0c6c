"""Gated linear attention with one decay a head, forward on a GPU: what each chunk writes and the
states between, in one scan or in two steps, then the outputs chunk by chunk. The equations are in
README.md.
"""

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile


@triton.jit
def chunk_gates(
    log_decay_BTJ, document_T, bj, n, T, row_C, J: tl.constexpr, HAS_DOCUMENTS: tl.constexpr
):
    """Of chunk n: which pairs (i, j) lie in one document with j <= i, the running sum G of the log
    decay in each document, its decays from the chunk's start and to its end, and across."""
    C: tl.constexpr = row_C.shape[0]
    t_C = n * C + row_C
    inside_C = t_C < T
    last = tl.minimum(T - n * C, C) - 1
    g_C = tl.load(log_decay_BTJ + (bj // J * T + t_C) * J + bj % J, inside_C, 0.0).to(tl.float32)
    # Beyond that nothing is left, and larger sums would cost the others their precision.
    g_C = tl.maximum(g_C, -64.0)
    upto_CC = row_C[:, None] >= row_C[None, :]
    reached_C = inside_C
    ends_C = inside_C
    if HAS_DOCUMENTS:
        document_T += bj // J * T
        document_C = tl.load(document_T + t_C, inside_C, -1)
        follows_C = t_C + bj // J > 0
        before_C = tl.load(document_T + t_C - 1, inside_C & follows_C, 0)
        g_C = tl.where((document_C != before_C) & follows_C, 0.0, g_C)
        upto_CC = upto_CC & (document_C[:, None] == document_C[None, :])
        first = n * C
        reached_C = reached_C & (document_C == tl.load(document_T + tl.maximum(first - 1, 0)))
        ends_C = ends_C & (document_C == tl.load(document_T + first + last))
    G_C = tl.sum(tl.where(upto_CC, g_C[None, :], 0.0), 1)
    G_last = tl.sum(tl.where(row_C == last, G_C, 0.0), 0)
    from_start_C = tl.where(reached_C, tl.exp(G_C), 0.0)
    to_end_C = tl.where(ends_C, tl.exp(G_last - G_C), 0.0)
    across = tl.sum(tl.where(row_C == last, from_start_C, 0.0), 0)
    return upto_CC, G_C, from_start_C, to_end_C, across


@triton.jit
def chunk_rows(
    x_BTHE,
    bj,
    n,
    T,
    row_C,
    H: tl.constexpr,
    J: tl.constexpr,
    E: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Chunk n of value head j's share of [B, T, H, E], as products take it; zero beyond T."""
    C: tl.constexpr = row_C.shape[0]
    head = bj % J // (J // H)
    pointers = tile(x_BTHE + head * E, bj // J * T + n * C, H * E, row_C, tl.arange(0, E))
    return tl.load(pointers, (n * C + row_C < T)[:, None], 0.0).to(PRODUCT)


@triton.jit(do_not_specialize=["T"])
def gla_write_kernel(
    x_BTHK,
    y_BTJV,
    log_decay_BTJ,
    document_T,
    write_BJNKV,
    across_BJN,
    scale,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    READS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """x^T (weight y) of one chunk and value head, fp32: what keys and values add to the state after
    it; or (READS) what queries and the output's gradient add to the gradient of the state before.
    """
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK_V
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    inside_C1 = (n * C + row_C < T)[:, None]
    first = b * T + n * C
    head = (j // (J // H)) * K
    x_CK = tl.load(tile(x_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
    y_CV = tl.load(tile(y_BTJV + j * V + column, first, J * V, row_C, value_V), inside_C1, 0.0)
    _, _, from_start_C, to_end_C, across = chunk_gates(
        log_decay_BTJ, document_T, bj, n, T, row_C, J, HAS_DOCUMENTS
    )
    weight_C = to_end_C
    if READS:
        weight_C = from_start_C * scale
    else:
        tl.store(across_BJN + bj * N + n, across)
    y_CV = (y_CV.to(tl.float32) * weight_C[:, None]).to(PRODUCT)
    write_KV = tl.dot(tl.trans(x_CK.to(PRODUCT)), y_CV)
    pointers = tile(write_BJNKV + column, (bj * N + n) * K, V, key_K, value_V)
    tl.store(pointers, write_KV.to(write_BJNKV.dtype.element_ty))


@triton.jit(do_not_specialize=["N"])
def gla_scan_kernel(
    write_BJNE,
    across,
    edge_BJE,
    states_BJNE,
    end_BJE,
    N,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """S' = across S + write over the chunks, for BLOCK of a state's E = K V numbers: the states
    that each chunk is entered with; or (REVERSE) the gradients that it is left with.

    `across` is [B, J, N], or PER_CHANNEL [B, H, N, K]."""
    E: tl.constexpr = K * V
    bj = tl.program_id(1).to(tl.int64)
    head = bj
    if PER_CHANNEL:
        head = bj // J * H + bj % J // (J // H)
    entry_E = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    S_E = tl.zeros([BLOCK], tl.float32)
    if HAS_EDGE:
        S_E = tl.load(edge_BJE + bj * E + entry_E).to(tl.float32)
    for step in tl.range(0, N, num_stages=STAGES):
        n = step
        if REVERSE:
            n = N - 1 - step
        chunk = bj * N + n
        write_E = tl.load(write_BJNE + chunk * E + entry_E).to(tl.float32)
        if PER_CHANNEL:
            decay = tl.load(across + (head * N + n) * K + entry_E // V)
        else:
            decay = tl.load(across + chunk)
        tl.store(states_BJNE + chunk * E + entry_E, S_E.to(states_BJNE.dtype.element_ty))
        S_E = decay * S_E + write_E
    tl.store(end_BJE + bj * E + entry_E, S_E)


@triton.jit(do_not_specialize=["T"])
def gla_weight_kernel(
    log_decay_BTJ,
    document_T,
    from_start_BTJ,
    to_end_BTJ,
    across_BJN,
    T,
    J: tl.constexpr,
    C: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Each token's decay from its chunk's start and to its end, and each chunk's own."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    row_C = tl.arange(0, C)
    _, _, from_start_C, to_end_C, across = chunk_gates(  # pyright: ignore[reportGeneralTypeIssues]
        log_decay_BTJ, document_T, bj, n, T, row_C, J, HAS_DOCUMENTS
    )
    inside_C = n * C + row_C < T
    gate_C = (bj // J * T + n * C + row_C) * J + bj % J
    tl.store(from_start_BTJ + gate_C, from_start_C, inside_C)
    tl.store(to_end_BTJ + gate_C, to_end_C, inside_C)
    tl.store(across_BJN + bj * N + n, across)


@triton.jit(do_not_specialize=["T"])
def gla_state_kernel(
    x_BTHK,
    y_BTJV,
    weight_BTJ,
    across_BJN,
    edge_BJKV,
    states_BJNKV,
    end_BJKV,
    scale,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    REVERSE: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`gla_write_kernel` and `gla_scan_kernel` in one walk over the chunks, for a tile of a state:
    what chunks write is never in memory."""
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.program_id(0) // (V // BLOCK_V) * BLOCK_K + tl.arange(0, BLOCK_K)
    value_V = tl.program_id(0) % (V // BLOCK_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = (j // (J // H)) * K
    S_KV = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_EDGE:
        S_KV = tl.load(tile(edge_BJKV, bj * K, V, key_K, value_V)).to(tl.float32)
    N = tl.cdiv(T, C)
    for step in tl.range(0, N, num_stages=STAGES):
        n = step
        if REVERSE:
            n = N - 1 - step
        inside_C = n * C + row_C < T
        inside_C1 = inside_C[:, None]
        first = b * T + n * C
        x_CK = tl.load(tile(x_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
        y_CV = tl.load(tile(y_BTJV + j * V, first, J * V, row_C, value_V), inside_C1, 0.0)
        weight_C = tl.load(weight_BTJ + (first + row_C) * J + j, inside_C, 0.0) * scale
        across = tl.load(across_BJN + bj * N + n)
        state_tile = tile(states_BJNKV, (bj * N + n) * K, V, key_K, value_V)
        tl.store(state_tile, S_KV.to(states_BJNKV.dtype.element_ty))
        y_CV = (y_CV.to(tl.float32) * weight_C[:, None]).to(PRODUCT)
        S_KV = tl.dot(tl.trans(x_CK.to(PRODUCT)), y_CV, across * S_KV)
    tl.store(tile(end_BJKV, bj * K, V, key_K, value_V), S_KV)


@triton.jit(do_not_specialize=["T"])
def gla_output_kernel(
    q_BTHK,
    k_BTHK,
    v_BTJV,
    log_decay_BTJ,
    document_T,
    states_BJNKV,
    o_BTJV,
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
    """o of one chunk and value head from the state before it."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    inside_C1 = (n * C + row_C < T)[:, None]
    first = b * T + n * C
    q_CK = chunk_rows(q_BTHK, bj, n, T, row_C, H, J, K, PRODUCT)
    k_CK = chunk_rows(k_BTHK, bj, n, T, row_C, H, J, K, PRODUCT)
    v_CV = chunk_rows(v_BTJV, bj, n, T, row_C, J, J, V, PRODUCT)
    S_KV = tl.load(tile(states_BJNKV, (bj * N + n) * K, V, key_K, value_V)).to(PRODUCT)
    upto_CC, G_C, from_start_C, _, _ = chunk_gates(
        log_decay_BTJ, document_T, bj, n, T, row_C, J, HAS_DOCUMENTS
    )
    o_CV = tl.dot(q_CK, S_KV) * (from_start_C * scale)[:, None]
    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf")))
    P_CC = tl.dot(q_CK, tl.trans(k_CK)) * decay_CC * scale
    o_CV = tl.dot(P_CC.to(PRODUCT), v_CV, o_CV)
    o_tile = tile(o_BTJV + j * V, first, J * V, row_C, value_V)
    tl.store(o_tile, o_CV.to(o_BTJV.dtype.element_ty), inside_C1)
