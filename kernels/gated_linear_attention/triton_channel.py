"""Gated linear attention with one decay a key channel on a GPU. The equations are in README.md.

G is the running sum of a channel's log decay from the chunk's or the document's start. Tokens of
different subchunks of SUB are compared through the token r before the later one's subchunk, which
both exponents G_i - G_r and G_r - G_j are at most 0 for; those of one subchunk are compared channel
by channel.
"""

# Loads have no type outside of a kernel.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile


@triton.jit
def chunk_documents(document_T, b, n, T, row_C, HAS_DOCUMENTS: tl.constexpr):
    """Of the tokens of row b's chunk n: their document, whether it reaches back beyond the chunk's
    start, and whether it goes up to its last token."""
    C: tl.constexpr = row_C.shape[0]
    t_C = n * C + row_C
    inside_C = t_C < T
    document_C = tl.where(inside_C, 0, -1)
    reached_C = inside_C
    ends_C = inside_C
    if HAS_DOCUMENTS:
        document_T += b * T
        document_C = tl.load(document_T + t_C, inside_C, -1)
        last = tl.minimum(n * C + C, T) - 1
        before = tl.load(document_T + tl.maximum(n * C - 1, 0))
        reached_C = inside_C & (document_C == before)
        ends_C = inside_C & (document_C == tl.load(document_T + last))
    return document_C, reached_C, ends_C


@triton.jit
def starts(document_T, document_C, b, n, T, row_C):
    """Which of the chunk's tokens begin a document; the stream's first token goes on with one."""
    C: tl.constexpr = row_C.shape[0]
    t_C = n * C + row_C
    follows_C = t_C + b > 0
    before_C = tl.load(document_T + b * T + t_C - 1, follows_C & (t_C < T), -1)
    return follows_C & (document_C != before_C)


@triton.jit
def decayed(x_CK, exponent_CK, where_C):
    """x exp(exponent) in the rows of `where`, else 0; the exponent is at most 0 there."""
    return x_CK * tl.exp(tl.where(where_C[:, None], tl.minimum(exponent_CK, 0.0), float("-inf")))


@triton.jit(do_not_specialize=["T"])
def gla_channel_sums_kernel(
    log_decay_BTHK,
    document_T,
    G_BHTK,
    across_BHNK,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Of one chunk and key head: G, and the decay across the chunk."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bh = tl.program_id(1).to(tl.int64)
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    t_C = n * C + row_C
    b = bh // H
    first = b * T + n * C
    head = bh % H * K
    g_tile = tile(log_decay_BTHK + head, first, H * K, row_C, key_K)
    # Beyond that nothing is left, and larger sums would cost the others their precision.
    g_CK = tl.maximum(tl.load(g_tile, (t_C < T)[:, None], 0.0).to(tl.float32), -64.0)
    document_C, reached_C, _ = chunk_documents(document_T, b, n, T, row_C, HAS_DOCUMENTS)
    upto_CC = (row_C[:, None] >= row_C[None, :]) & (document_C[:, None] == document_C[None, :])
    if HAS_DOCUMENTS:
        starts_C = starts(document_T, document_C, b, n, T, row_C)
        g_CK = tl.where(starts_C[:, None], 0.0, g_CK)
    G_CK = tl.dot(upto_CC.to(tl.float32), g_CK, input_precision="tf32x3")
    tl.store(tile(G_BHTK, (bh * N + n) * C, K, row_C, key_K), G_CK)
    last_C = t_C == tl.minimum(n * C + C, T) - 1
    across_CK = tl.where((last_C & reached_C)[:, None], tl.exp(tl.minimum(G_CK, 0.0)), 0.0)
    tl.store(across_BHNK + (bh * N + n) * K + key_K, tl.sum(across_CK, 0))


@triton.jit(do_not_specialize=["T"])
def gla_channel_write_kernel(
    k_BTHK,
    v_BTJV,
    document_T,
    G_BHTK,
    write_BJNKV,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and value head: k^T v, each channel decayed to the chunk's end, fp32."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    h = j // (J // H)
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    inside_C1 = (n * C + row_C < T)[:, None]
    first = b * T + n * C
    at = ((b * H + h) * N + n) * C
    _, _, ends_C = chunk_documents(document_T, b, n, T, row_C, HAS_DOCUMENTS)
    k_CK = tl.load(tile(k_BTHK + h * K, first, H * K, row_C, key_K), inside_C1, 0.0).to(tl.float32)
    G_CK = tl.load(tile(G_BHTK, at, K, row_C, key_K))
    last = tl.minimum(T - n * C, C) - 1
    G_last_K = tl.load(G_BHTK + (at + last) * K + key_K)
    k_CK = decayed(k_CK, G_last_K[None, :] - G_CK, ends_C).to(PRODUCT)
    v_CV = tl.load(tile(v_BTJV + j * V, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
    write_KV = tl.dot(tl.trans(k_CK), v_CV)
    tl.store(tile(write_BJNKV, (bj * N + n) * K, V, key_K, value_V), write_KV)


@triton.jit(do_not_specialize=["T"])
def gla_channel_scores_kernel(
    q_BTHK,
    k_BTHK,
    document_T,
    G_BHTK,
    P_BHTC,
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    SUB: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and key head: P, scale included."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bh = tl.program_id(1).to(tl.int64)
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    inside_C1 = (n * C + row_C < T)[:, None]
    b = bh // H
    first = b * T + n * C
    head = bh % H * K
    at = (bh * N + n) * C
    document_C, _, _ = chunk_documents(document_T, b, n, T, row_C, HAS_DOCUMENTS)
    q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(tl.float32)
    k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(tl.float32)
    G_CK = tl.load(tile(G_BHTK, at, K, row_C, key_K))
    P_CC = tl.zeros([C, C], tl.float32)
    for r in range(SUB - 1, C - 1, SUB):
        G_r_1K = tl.load(G_BHTK + (at + r) * K + key_K)[None, :]
        same_C = document_C == tl.sum(tl.where(row_C == r, document_C, 0), 0)
        later_C = same_C & (row_C > r) & (row_C <= r + SUB)
        q_r_CK = decayed(q_CK, G_CK - G_r_1K, later_C).to(PRODUCT)
        k_r_CK = decayed(k_CK, G_r_1K - G_CK, same_C & (row_C <= r)).to(PRODUCT)
        P_CC += tl.dot(q_r_CK, tl.trans(k_r_CK))
    for i in range(SUB):
        other_C = row_C // SUB * SUB + i
        k_i_tile = tile(k_BTHK + head, first, H * K, other_C, key_K)
        k_i_CK = tl.load(k_i_tile, (n * C + other_C < T)[:, None], 0.0).to(tl.float32)
        G_i_CK = tl.load(tile(G_BHTK, at, K, other_C, key_K))
        score_C = tl.sum(decayed(q_CK * k_i_CK, G_CK - G_i_CK, other_C <= row_C), 1)
        P_CC += tl.where(row_C[None, :] == other_C[:, None], score_C[:, None], 0.0)
    upto_CC = (row_C[:, None] >= row_C[None, :]) & (document_C[:, None] == document_C[None, :])
    P_CC = tl.where(upto_CC, P_CC * scale, 0.0)
    tl.store(tile(P_BHTC, at, C, row_C, row_C), P_CC.to(P_BHTC.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def gla_channel_output_kernel(
    q_BTHK,
    v_BTJV,
    document_T,
    G_BHTK,
    P_BHTC,
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
    h = j // (J // H)
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    inside_C1 = (n * C + row_C < T)[:, None]
    first = b * T + n * C
    at = ((b * H + h) * N + n) * C
    _, reached_C, _ = chunk_documents(document_T, b, n, T, row_C, HAS_DOCUMENTS)
    q_CK = tl.load(tile(q_BTHK + h * K, first, H * K, row_C, key_K), inside_C1, 0.0).to(tl.float32)
    G_CK = tl.load(tile(G_BHTK, at, K, row_C, key_K))
    q_CK = (decayed(q_CK, G_CK, reached_C) * scale).to(PRODUCT)
    S_KV = tl.load(tile(states_BJNKV, (bj * N + n) * K, V, key_K, value_V)).to(PRODUCT)
    v_CV = tl.load(tile(v_BTJV + j * V, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
    P_CC = tl.load(tile(P_BHTC, at, C, row_C, row_C)).to(PRODUCT)
    o_CV = tl.dot(P_CC, v_CV, tl.dot(q_CK, S_KV))
    o_tile = tile(o_BTJV + j * V, first, J * V, row_C, value_V)
    tl.store(o_tile, o_CV.to(o_BTJV.dtype.element_ty), inside_C1)


@triton.jit(do_not_specialize=["T"])
def gla_channel_query_kernel(
    q_BTHK,
    k_BTHK,
    v_BTJV,
    do_BTJV,
    document_T,
    G_BHTK,
    states_BJNKV,
    dq_BTHK,
    dG_BTHK,
    dP_BHTC,
    read_BJNKV,
    scale,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    SUB: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and key head: dP, dq, and what queries give to the gradient of G; of its value
    heads what they give to that of the state before the chunk, fp32."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    inside_C1 = (n * C + row_C < T)[:, None]
    first = b * T + n * C
    at = (bh * N + n) * C
    document_C, reached_C, _ = chunk_documents(document_T, b, n, T, row_C, HAS_DOCUMENTS)
    q_tile = tile(q_BTHK + h * K, first, H * K, row_C, key_K)
    q_CK = tl.load(q_tile, inside_C1, 0.0).to(tl.float32)
    G_CK = tl.load(tile(G_BHTK, at, K, row_C, key_K))
    read_CK = (decayed(q_CK, G_CK, reached_C) * scale).to(PRODUCT)
    dq_CK = tl.zeros([C, K], tl.float32)
    dP_CC = tl.zeros([C, C], tl.float32)
    for j in range(h * (J // H), (h + 1) * (J // H)):
        value = tile(v_BTJV + j * V, first, J * V, row_C, value_V)
        v_CV = tl.load(value, inside_C1, 0.0).to(PRODUCT)
        do_tile = tile(do_BTJV + j * V, first, J * V, row_C, value_V)
        do_CV = tl.load(do_tile, inside_C1, 0.0).to(PRODUCT)
        state = ((b * J + j) * N + n) * K
        S_KV = tl.load(tile(states_BJNKV, state, V, key_K, value_V)).to(PRODUCT)
        dP_CC = tl.dot(do_CV, tl.trans(v_CV), dP_CC)
        dq_CK = tl.dot(do_CV, tl.trans(S_KV), dq_CK)
        read_KV = tl.dot(tl.trans(read_CK), do_CV)
        tl.store(tile(read_BJNKV, state, V, key_K, value_V), read_KV)
    dq_CK = decayed(dq_CK, G_CK, reached_C) * scale
    upto_CC = (row_C[:, None] >= row_C[None, :]) & (document_C[:, None] == document_C[None, :])
    dP_low_CC = tl.where(upto_CC, dP_CC * scale, 0.0).to(dP_BHTC.dtype.element_ty)
    tl.store(tile(dP_BHTC, at, C, row_C, row_C), dP_low_CC)

    # As keys see it, so that the two parts of a pair in the gradient of G cancel.
    dP_CC = dP_low_CC.to(tl.float32)
    k_tile = tile(k_BTHK + h * K, first, H * K, row_C, key_K)
    k_CK = tl.load(k_tile, inside_C1, 0.0).to(tl.float32)
    for r in range(SUB - 1, C - 1, SUB):
        G_r_1K = tl.load(G_BHTK + (at + r) * K + key_K)[None, :]
        same_C = document_C == tl.sum(tl.where(row_C == r, document_C, 0), 0)
        later_C = same_C & (row_C > r) & (row_C <= r + SUB)
        k_r_CK = decayed(k_CK, G_r_1K - G_CK, same_C & (row_C <= r))
        dq_r_CK = tl.dot(dP_CC, k_r_CK, input_precision="tf32")
        dq_CK += decayed(dq_r_CK, G_CK - G_r_1K, later_C)
    for i in range(SUB):
        other_C = row_C // SUB * SUB + i
        k_i_tile = tile(k_BTHK + h * K, first, H * K, other_C, key_K)
        k_i_CK = tl.load(k_i_tile, (n * C + other_C < T)[:, None], 0.0).to(tl.float32)
        G_i_CK = tl.load(tile(G_BHTK, at, K, other_C, key_K))
        dP_C = tl.sum(tl.where(row_C[None, :] == other_C[:, None], dP_CC, 0.0), 1)
        dq_CK += decayed(dP_C[:, None] * k_i_CK, G_CK - G_i_CK, other_C < row_C)
    tl.store(tile(dG_BTHK + h * K, first, H * K, row_C, key_K), dq_CK * q_CK, inside_C1)
    # Between a token and itself nothing decays.
    own_C = tl.sum(tl.where(row_C[:, None] == row_C[None, :], dP_CC, 0.0), 1)
    dq_CK += own_C[:, None] * k_CK
    dq_tile = tile(dq_BTHK + h * K, first, H * K, row_C, key_K)
    tl.store(dq_tile, dq_CK.to(dq_BTHK.dtype.element_ty), inside_C1)


@triton.jit(do_not_specialize=["T"])
def gla_channel_key_kernel(
    q_BTHK,
    k_BTHK,
    v_BTJV,
    do_BTJV,
    document_T,
    G_BHTK,
    across_BHNK,
    P_BHTC,
    dP_BHTC,
    states_BJNKV,
    dstates_BJNKV,
    dk_BTHK,
    dv_BTJV,
    dlog_decay_BTHK,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    SUB: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and key head: dk, its value heads' dv, and the log decay's gradient, in whose
    place is what the queries give to that of G."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first = b * T + n * C
    at = (bh * N + n) * C
    document_C, _, ends_C = chunk_documents(document_T, b, n, T, row_C, HAS_DOCUMENTS)
    k_tile = tile(k_BTHK + h * K, first, H * K, row_C, key_K)
    k_CK = tl.load(k_tile, inside_C1, 0.0).to(tl.float32)
    G_CK = tl.load(tile(G_BHTK, at, K, row_C, key_K))
    last = tl.minimum(T - n * C, C) - 1
    to_end_CK = tl.load(G_BHTK + (at + last) * K + key_K)[None, :] - G_CK
    kept_CK = decayed(k_CK, to_end_CK, ends_C).to(PRODUCT)
    # Transposed by their addresses: row j is a key, column i a query.
    P_CC = tl.load(P_BHTC + at * C + row_C[None, :] * C + row_C[:, None]).to(PRODUCT)
    dk_CK = tl.zeros([C, K], tl.float32)
    passed_K = tl.zeros([K], tl.float32)
    for j in range(h * (J // H), (h + 1) * (J // H)):
        value = tile(v_BTJV + j * V, first, J * V, row_C, value_V)
        v_CV = tl.load(value, inside_C1, 0.0).to(PRODUCT)
        do_tile = tile(do_BTJV + j * V, first, J * V, row_C, value_V)
        do_CV = tl.load(do_tile, inside_C1, 0.0).to(PRODUCT)
        state = ((b * J + j) * N + n) * K
        S_KV = tl.load(tile(states_BJNKV, state, V, key_K, value_V)).to(tl.float32)
        dS_KV = tl.load(tile(dstates_BJNKV, state, V, key_K, value_V)).to(PRODUCT)
        passed_K += tl.sum(S_KV * dS_KV.to(tl.float32), 1)
        dk_CK = tl.dot(v_CV, tl.trans(dS_KV), dk_CK)
        dv_CV = tl.dot(P_CC, do_CV, tl.dot(kept_CK, dS_KV))
        dv_tile = tile(dv_BTJV + j * V, first, J * V, row_C, value_V)
        tl.store(dv_tile, dv_CV.to(dv_BTJV.dtype.element_ty), inside_C1)
    dk_CK = decayed(dk_CK, to_end_CK, ends_C)
    passed_K *= tl.load(across_BHNK + (bh * N + n) * K + key_K)
    passed_K += tl.sum(dk_CK * k_CK, 0)

    q_tile = tile(q_BTHK + h * K, first, H * K, row_C, key_K)
    q_CK = tl.load(q_tile, inside_C1, 0.0).to(tl.float32)
    dP_CC = tl.load(dP_BHTC + at * C + row_C[None, :] * C + row_C[:, None]).to(tl.float32)
    for r in range(SUB - 1, C - 1, SUB):
        G_r_1K = tl.load(G_BHTK + (at + r) * K + key_K)[None, :]
        same_C = document_C == tl.sum(tl.where(row_C == r, document_C, 0), 0)
        later_C = same_C & (row_C > r) & (row_C <= r + SUB)
        q_r_CK = decayed(q_CK, G_CK - G_r_1K, later_C)
        dk_r_CK = tl.dot(dP_CC, q_r_CK, input_precision="tf32")
        dk_CK += decayed(dk_r_CK, G_r_1K - G_CK, same_C & (row_C <= r))
    for i in range(SUB):
        other_C = row_C // SUB * SUB + i
        q_i_tile = tile(q_BTHK + h * K, first, H * K, other_C, key_K)
        q_i_CK = tl.load(q_i_tile, (n * C + other_C < T)[:, None], 0.0).to(tl.float32)
        G_i_CK = tl.load(tile(G_BHTK, at, K, other_C, key_K))
        dP_C = tl.sum(tl.where(row_C[None, :] == other_C[:, None], dP_CC, 0.0), 1)
        dk_CK += decayed(dP_C[:, None] * q_i_CK, G_i_CK - G_CK, other_C > row_C)

    dG_tile = tile(dlog_decay_BTHK + h * K, first, H * K, row_C, key_K)
    dG_CK = tl.load(dG_tile, inside_C1, 0.0) - dk_CK * k_CK
    dG_CK += tl.where((row_C == last)[:, None], passed_K[None, :], 0.0)
    after_CC = (row_C[:, None] <= row_C[None, :]) & (document_C[:, None] == document_C[None, :])
    dg_CK = tl.dot(after_CC.to(tl.float32), dG_CK, input_precision="tf32x3")
    if HAS_DOCUMENTS:
        starts_C = starts(document_T, document_C, b, n, T, row_C)
        dg_CK = tl.where(starts_C[:, None], 0.0, dg_CK)
    # Every row has been read by then.
    tl.debug_barrier()
    tl.store(dG_tile, dg_CK, inside_C1)
    own_C = tl.sum(tl.where(row_C[:, None] == row_C[None, :], dP_CC, 0.0), 1)
    dk_CK += own_C[:, None] * q_CK
    dk_tile = tile(dk_BTHK + h * K, first, H * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk_BTHK.dtype.element_ty), inside_C1)
