"""Log-linear attention on the gated linear base, forward on a GPU: what each chunk writes, the tree
of these, then the outputs chunk by chunk. The equations are in README.md, the tables in
`triton_plan.py`.
"""

# Loads have no type outside of a kernel.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile


@triton.jit
def load_chunk(chunk_N4, n):
    """The token of its slot 0, its first filled slot and the end of these, its number."""
    row = chunk_N4 + n * 4
    return tl.load(row).to(tl.int64), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit(do_not_specialize=["T", "S"])
def log_linear_write_kernel(
    k_BTHK,
    v_BTJV,
    log_decay_BTJ,
    chunk_N4,
    cumulative_BJNC,
    tree_BJSKV,
    T,
    S,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and value head: the running sum of its log decay, and k^T v decayed to its end,
    fp32, in its slot of the tree."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK_V
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    first, begin, end, _ = load_chunk(chunk_N4, n)
    first += b * T
    inside_C = (row_C >= begin) & (row_C < end)
    g_C = tl.load(log_decay_BTJ + (first + row_C) * J + j, inside_C, 0.0).to(tl.float32)
    # Beyond that nothing is left, and larger sums would cost the others their precision.
    g_C = tl.maximum(g_C, -64.0)
    G_C = tl.sum(tl.where(row_C[:, None] >= row_C[None, :], g_C[None, :], 0.0), 1)
    tl.store(cumulative_BJNC + (bj * N + n) * C + row_C, G_C)
    to_end_C = tl.exp(tl.sum(g_C, 0) - G_C)
    head = (j // (J // H)) * K
    k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C[:, None], 0.0)
    v_tile = tile(v_BTJV + j * V + column, first, J * V, row_C, value_V)
    v_CV = tl.load(v_tile, inside_C[:, None], 0.0)
    v_CV = (v_CV.to(tl.float32) * to_end_C[:, None]).to(PRODUCT)
    write_KV = tl.dot(tl.trans(k_CK.to(PRODUCT)), v_CV)
    tl.store(tile(tree_BJSKV + column, (bj * S + n) * K, V, key_K, value_V), write_KV)


@triton.jit(do_not_specialize=["N", "stride", "M_STRIDE"])
def log_linear_block_sums_kernel(
    x_BJN,
    chunk_N4,
    sums_BJMN,
    N,
    stride,
    M_STRIDE,
    TILE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """For one bit m: the sum of x over the chunks before each one (REVERSE: after it) among the 2^m
    that share their number's higher bits. Sums of what is there alone: no differences.

    Args: x's chunks are `stride` apart, a head's N of them follow another's; M_STRIDE 1 gives every
    bit an x of its own, [B, J, M, N].
    """
    m = tl.program_id(0)
    M = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    row_N = tl.arange(0, TILE)
    x_BJN += (bj * (1 + (M - 1) * M_STRIDE) + m * M_STRIDE) * N * stride
    tiles = tl.cdiv(N, TILE)
    carried = 0.0
    edge = -(1 << 30)
    for step in range(tiles):
        i = step
        if REVERSE:
            i = tiles - 1 - step
        n_N = i * TILE + row_N
        number_N = tl.load(chunk_N4 + n_N * 4 + 3, n_N < N, 0)
        # Where the block begins: no other's does there.
        block_N = tl.where(n_N < N, n_N - (number_N & ((1 << m) - 1)), 1 << 30)
        x_N = tl.load(x_BJN + n_N.to(tl.int64) * stride, n_N < N, 0.0)
        if REVERSE:
            earlier_NN = n_N[:, None] < n_N[None, :]
            at = i * TILE
        else:
            earlier_NN = n_N[:, None] > n_N[None, :]
            at = tl.minimum(i * TILE + TILE, N) - 1
        same_NN = block_N[:, None] == block_N[None, :]
        sum_N = tl.sum(tl.where(same_NN & earlier_NN, x_N[None, :], 0.0), 1)
        sum_N += tl.where(block_N == edge, carried, 0.0)
        tl.store(sums_BJMN + (bj * M + m) * N + n_N, sum_N, n_N < N)
        next_edge = tl.sum(tl.where(n_N == at, block_N, 0), 0)
        kept = tl.where(next_edge == edge, carried, 0.0)
        carried = kept + tl.sum(tl.where(block_N == next_edge, x_N, 0.0), 0)
        edge = next_edge


@triton.jit(do_not_specialize=["N", "S", "M"])
def log_linear_tree_kernel(
    tree_BJSE,
    low_BJSE,
    cumulative_BJNC,
    before_BJMN,
    first_write_BJE,
    chunk_N4,
    stretch_R2,
    N,
    S,
    M,
    C: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    """Makes the chunks' writes nodes, in place, and rounds them: the write of chunk c takes up the
    nodes before it that its own contains, decayed to its end. BLOCK of the E = K V numbers, of one
    stretch of documents."""
    bj = tl.program_id(1).to(tl.int64)
    entry_E = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stretch = stretch_R2 + tl.program_id(2) * 2
    for n in range(tl.load(stretch), tl.load(stretch + 1)):
        number = tl.load(chunk_N4 + n * 4 + 3)
        across = tl.load(cumulative_BJNC + (bj * N + n) * C + C - 1)
        node_E = tl.load(tree_BJSE + (bj * S + n) * E + entry_E)
        if HAS_FIRST:  # noqa: SIM102 (a constant and a value)
            if n == 0:
                node_E += tl.load(first_write_BJE + bj * E + entry_E).to(tl.float32)
        size = 1
        m = 0
        while ((number + 1) & ((size << 1) - 1)) == 0:
            slot = tl.where(n < size, N + m, n - size)
            between = across + tl.load(before_BJMN + (bj * M + m) * N + n)
            node_E += tl.exp(between) * tl.load(tree_BJSE + (bj * S + slot) * E + entry_E)
            size = size << 1
            m += 1
        tl.store(tree_BJSE + (bj * S + n) * E + entry_E, node_E)
        tl.store(low_BJSE + (bj * S + n) * E + entry_E, node_E.to(low_BJSE.dtype.element_ty))
        # The next nodes are made of this one.
        tl.debug_barrier()


@triton.jit
def level_weights(lambda_BTJL, row_C, inside_C, first_level, L: tl.constexpr, C: tl.constexpr):
    """[C, C]: the lambda of the level at which token i of a chunk sees j."""
    distance_CC = row_C[:, None] ^ row_C[None, :]
    weight_CC = tl.zeros([C, C], tl.float32)
    for level in tl.static_range(0, 7):
        if level < L:
            lambda_C = tl.load(lambda_BTJL + first_level + level, inside_C, 0.0).to(tl.float32)
            weight_CC = tl.where(of_level(distance_CC, level), lambda_C[:, None], weight_CC)
    return weight_CC


@triton.jit
def of_level(distance_CC, level: tl.constexpr):
    """Where bit_length(i xor j) is the level."""
    if level == 0:
        return distance_CC == 0
    return (distance_CC >> (level - 1)) == 1


@triton.jit(do_not_specialize=["T", "S", "M"])
def log_linear_output_kernel(
    q_BTHK,
    k_BTHK,
    v_BTJV,
    lambda_BTJL,
    chunk_N4,
    cumulative_BJNC,
    before_BJMN,
    low_BJSKV,
    o_BTJV,
    scale,
    T,
    S,
    M,
    L: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """o of one chunk and value head, from its own tokens and the nodes before it."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    first, begin, end, number = load_chunk(chunk_N4, n)
    first += b * T
    inside_C = (row_C >= begin) & (row_C < end)
    inside_C1 = inside_C[:, None]
    head = (j // (J // H)) * K
    q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    v_CV = tl.load(tile(v_BTJV + j * V, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
    G_C = tl.load(cumulative_BJNC + (bj * N + n) * C + row_C)
    first_level_C = ((first + row_C) * J + j) * L

    upto_CC = row_C[:, None] >= row_C[None, :]
    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf"))) * scale
    weight_CC = level_weights(lambda_BTJL, row_C, inside_C, first_level_C, L, C)
    P_CC = tl.dot(q_CK, tl.trans(k_CK)) * decay_CC * weight_CC
    o_CV = tl.dot(P_CC.to(PRODUCT), v_CV)
    for m in range(M):
        size = 1 << m
        if (number & size) != 0:
            before = n - (number & (size - 1)) - 1
            slot = tl.where(before < 0, N + m, before)
            node_KV = tl.load(tile(low_BJSKV, (bj * S + slot) * K, V, key_K, value_V)).to(PRODUCT)
            between = tl.load(before_BJMN + (bj * M + m) * N + n)
            lambda_C = tl.load(lambda_BTJL + first_level_C + 7 + m, inside_C, 0.0).to(tl.float32)
            read_C = lambda_C * tl.exp(G_C + between) * scale
            o_CV += tl.dot(q_CK, node_KV) * read_C[:, None]
    o_tile = tile(o_BTJV + j * V, first, J * V, row_C, value_V)
    tl.store(o_tile, o_CV.to(o_BTJV.dtype.element_ty), inside_C1)
