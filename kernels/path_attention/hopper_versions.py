"""Keys and queries in versions on an H100 or H200 (hopper_tiles.py): what triton_maps.py's two
version kernels compute, a tile of keys and then its queries, to which X goes through shared memory.

In shared memory: two tiles of tokens, three of the maps' factors and maps, and one that waits to be
written, of 32 KiB each, and X.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mixtron.kernels.hopper_tools import CONSUMER_REGISTERS, PRODUCER_REGISTERS, barriers
from mixtron.kernels.path_attention.hopper_tiles import (
    BLOCK,
    COLUMN,
    ROW,
    SQUARE,
    C,
    begin,
    fill,
    fill_triangle,
    free,
    left,
    left_block,
    of_pair,
    pairs,
    ring,
    sum_block,
    take,
    take_half,
    times,
    transposed,
    write,
    write_rows,
)
from mixtron.kernels.path_attention.triton_tree import (
    first_tile,
    key_version,
    last_tile,
    query_version,
    versions_at,
)

TOKENS, FACTORS = gl.constexpr(2), gl.constexpr(3)
"""Slots of the rings."""
VARYING = ("T", "G", "heads", "tiles", "levels", "reach", "versions", "nodes")


@gluon.jit(do_not_specialize=VARYING)
def hopper_version_kernel(
    q, k, w, L, Y, maps, XT, logits, q_versions, k_versions, beta, start_S, end_S, scale,
    T, G, heads, tiles, levels, reach, versions, nodes,
    R: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Of all tiles of `heads` key/value heads X^T and the keys' versions; of the query heads with
    these the logits inside tiles and the versions.

    The first ten are descriptors of matrices in boxes of 64 x 64: q and k of [B T, H K] and
    [B T, G K], w and Y of [B G S, K], L and XT of [B G S, C], maps of [B G nodes K, K], logits of
    [B H S, C], versions of [B H versions C, K] and [B G versions C, K]; logits' FINE entries as
    q's dtype.
    """
    rings = ring(k, TOKENS), ring(w, FACTORS)
    out_s = gl.allocate_shared_memory(q.dtype, [4, BLOCK, BLOCK], q.layout)
    XT_s = gl.allocate_shared_memory(w.dtype, [3, BLOCK, BLOCK], w.layout)
    # The first half's rows of X^T are there for the second one; it needs them no more.
    handed = XT_s, barriers(1, 1), barriers(1, 1)
    fence_async_shared()
    sizes = T, G, heads, tiles
    tree = levels, reach, versions, nodes
    operands = q, k, w, L, Y, maps
    vectors = beta, start_S, end_S, scale
    outputs = out_s, XT, logits, q_versions, k_versions
    consumed = rings, handed, vectors, outputs, sizes, tree
    gl.warp_specialize(
        [
            (_consume, (consumed, 0, R, FINE, DOCUMENTS)),
            (_consume, (consumed, 1, R, FINE, DOCUMENTS)),
            (_produce, (rings, operands, (start_S, end_S), sizes, tree, R, DOCUMENTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(rings, operands, bounds, sizes, tree, R: gl.constexpr, DOCUMENTS: gl.constexpr):
    tokens, factors = rings
    q, k, w, L, Y, maps = operands
    start_S, end_S = bounds
    T, G, heads, tiles = sizes
    levels, _reach, _versions, nodes = tree
    t_n, f_n = gl.to_tensor(0), gl.to_tensor(0)
    for pair in range(gl.program_id(0), pairs(tiles) * heads, gl.num_programs(0)):
        bg, begin_c, end_c, step = of_pair(pair, tiles)
        for c in range(begin_c, end_c, step):
            first_c = first_tile(start_S, c, C, DOCUMENTS)
            last = last_tile(end_S, c, tiles, C, DOCUMENTS)
            token, g = bg // G * T + c * C, bg % G
            own = (bg * tiles + c) * C
            fill(tokens, t_n, k, token, g * C)
            fill(factors, f_n, w, own, 0)
            fill_triangle(factors, f_n + 1, L, own, 1)
            t_n += 1
            f_n += 2
            node = bg * nodes
            for level in range(levels):
                edge = ((c >> level) + 1) << level
                if ((c >> level) % 2 == 0) & (edge + (1 << level) <= last):
                    fill(factors, f_n, maps, (node + (c >> level) + 1) * C, 0)
                    f_n += 1
                node += tiles >> level
            for r in range(R):
                fill(tokens, t_n, q, token, (g * R + r) * C)
                fill(factors, f_n, w, own, 0)
                fill(tokens, t_n + 1, k, token, g * C)
                fill(factors, f_n + 1, Y, own, 0)
                t_n += 2
                f_n += 2
                node = bg * nodes
                for level in range(levels):
                    edge = (c >> level) << level
                    if ((c >> level) % 2 == 1) & (first_c < edge - (1 << level)):
                        fill(factors, f_n, maps, (node + (c >> level) - 1) * C, 0)
                        f_n += 1
                    node += tiles >> level


@gluon.jit
def _consume(
    consumed, HALF: gl.constexpr,
    R: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Half of every tile."""
    _rings, handed, _vectors, _outputs, sizes, _tree = consumed
    _T, _G, heads, tiles = sizes
    _XT_s, _ready, done = handed
    t_n, f_n, n = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for pair in range(gl.program_id(0), pairs(tiles) * heads, gl.num_programs(0)):
        bg, begin_c, end_c, step = of_pair(pair, tiles)
        for c in range(begin_c, end_c, step):
            t_n, f_n = _carry_keys(consumed, c, bg, t_n, f_n, n, HALF, FINE, DOCUMENTS)
            for r in range(R):
                bh = bg * R + r
                t_n, f_n = _carry_queries(consumed, c, bg, bh, t_n, f_n, n, HALF, FINE, DOCUMENTS)
            if HALF == 1:
                mbarrier.arrive(done.index(0))
            n += 1
    tma.store_wait(0)


@gluon.jit
def _carry_keys(
    consumed, c, bg, t_n, f_n, n, HALF: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr
):
    """Rows of X^T and keys of half a tile, the program's n-th. The second half's rows of X^T begin
    with zeros: what these are multiplied with is left out. Returns what comes next in the rings."""
    rings, handed, vectors, outputs, sizes, tree = consumed
    tokens, factors = rings
    XT_s, ready, done = handed
    beta, _start_S, end_S, _scale = vectors
    out_s, XT, _logits, _q_versions, k_versions = outputs
    T, _G, _heads, tiles = sizes
    levels, reach, versions, _nodes = tree
    row_B, column_B = gl.arange(0, BLOCK, ROW) + HALF * BLOCK, gl.arange(0, BLOCK, COLUMN)
    zeros_BB = gl.zeros([BLOCK, BLOCK], gl.float32, SQUARE)
    first, own = c * C, (bg * tiles + c) * C
    last = last_tile(end_S, c, tiles, C, DOCUMENTS)
    end_B = row_B
    if DOCUMENTS:
        end_B = gl.load(end_S + first + row_B) - first
    inside_B1 = (first + row_B < T)[:, None]
    k_0, k_1 = take_half(tokens, t_n, HALF)
    left_0, left_1 = left_block(k_0, FINE), left_block(k_1, FINE)

    # B = tril(W K^T, -1), transposed.
    w_00, w_01, w_10, w_11 = take(factors, f_n)
    B_0, B_1 = zeros_BB, begin(left_0, left_1, transposed(w_10), transposed(w_11))
    if HALF == 0:
        B_0 = begin(left_0, left_1, transposed(w_00), transposed(w_01))
    B_0, B_1 = warpgroup_mma_wait(0, deps=[B_0, B_1])
    before_BB = _before(row_B, column_B + BLOCK, end_B, DOCUMENTS)
    B_1 = left(gl.where(before_BB & inside_B1, B_1, 0.0), FINE)
    L_00, L_10, L_11, _empty = take(factors, f_n + 1)
    X_0 = zeros_BB
    X_1 = warpgroup_mma(B_1, transposed(L_11), zeros_BB, use_acc=False, is_async=True)
    if HALF == 0:
        before_BB = _before(row_B, column_B, end_B, DOCUMENTS)
        B_0 = left(gl.where(before_BB & inside_B1, B_0, 0.0), FINE)
        X_1 = warpgroup_mma(B_0, transposed(L_10), X_1, is_async=True)
        X_0 = warpgroup_mma(B_0, transposed(L_00), zeros_BB, use_acc=False, is_async=True)
    beta_0, beta_1 = _of_columns(beta + own, column_B)
    X_0, X_1 = warpgroup_mma_wait(0, deps=[X_0, X_1])
    free(factors, f_n + 1)

    x_0, x_1 = sum_block(k_0), sum_block(k_1)
    free(tokens, t_n)
    left_1 = left(X_1 * -beta_1[None, :], FINE)
    x_0 = warpgroup_mma(left_1, w_10, x_0, is_async=True)
    x_1 = warpgroup_mma(left_1, w_11, x_1, is_async=True)
    if HALF == 0:
        left_0 = left(X_0 * -beta_0[None, :], FINE)
        x_0 = warpgroup_mma(left_0, w_00, x_0, is_async=True)
        x_1 = warpgroup_mma(left_0, w_01, x_1, is_async=True)
    tma.store_wait(0)
    if HALF == 0:
        mbarrier.wait(done.index(0), (n & 1) ^ 1)
        write(XT, own, 0, XT_s.index(0), X_0.to(FINE))
        write(XT, own, BLOCK, XT_s.index(1), X_1.to(FINE))
        mbarrier.arrive(ready.index(0))
    else:
        write(XT, own + BLOCK, BLOCK, XT_s.index(2), X_1.to(FINE))
    x_0, x_1 = warpgroup_mma_wait(0, deps=[x_0, x_1])
    free(factors, f_n)
    f_n += 2

    tile = bg * versions
    for level in range(levels):
        edge = ((c >> level) + 1) << level
        if ((c >> level) % 2 == 0) & (edge <= last):
            row = (tile + key_version(c, level, reach)) * C
            write_rows(k_versions, row, out_s, x_0, x_1, HALF)
            if edge + (1 << level) <= last:
                P_00, P_01, P_10, P_11 = take(factors, f_n)
                P_00, P_01 = transposed(P_00), transposed(P_01)
                P_10, P_11 = transposed(P_10), transposed(P_11)
                x_0, x_1 = times(x_0, x_1, P_00, P_10, P_01, P_11, FINE)
                free(factors, f_n)
                f_n += 1
        tile += versions_at(level, tiles, reach)
    return t_n + 1, f_n


@gluon.jit
def _carry_queries(
    consumed, a, bg, bh, t_n, f_n, n,
    HALF: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Logits and queries of half a tile, of one head with these keys. The first half's rows of
    M end with zeros: what these are multiplied with is left out, and logits that no query sees."""
    rings, handed, vectors, outputs, sizes, tree = consumed
    tokens, factors = rings
    XT_s, ready, _done = handed
    beta, start_S, _end_S, scale = vectors
    out_s, _XT, logits, q_versions, _k_versions = outputs
    T, _G, _heads, tiles = sizes
    levels, reach, versions, _nodes = tree
    row_B, column_B = gl.arange(0, BLOCK, ROW) + HALF * BLOCK, gl.arange(0, BLOCK, COLUMN)
    zeros_BB = gl.zeros([BLOCK, BLOCK], gl.float32, SQUARE)
    first, own = a * C, (bg * tiles + a) * C
    first_a = first_tile(start_S, a, C, DOCUMENTS)
    start_B = row_B
    if DOCUMENTS:
        start_B = gl.load(start_S + first + row_B) - first
    inside_B1 = (first + row_B < T)[:, None]
    q_0, q_1 = take_half(tokens, t_n, HALF)
    left_0, left_1 = left_block(q_0, FINE), left_block(q_1, FINE)

    w_00, w_01, w_10, w_11 = take(factors, f_n)
    M_0, M_1 = begin(left_0, left_1, transposed(w_00), transposed(w_01)), zeros_BB
    if HALF == 1:
        M_1 = begin(left_0, left_1, transposed(w_10), transposed(w_11))
    beta_0, beta_1 = _of_columns(beta + own, column_B)
    M_0, M_1 = warpgroup_mma_wait(0, deps=[M_0, M_1])
    free(factors, f_n)
    upto_BB = _upto(row_B, column_B, start_B, DOCUMENTS)
    M_0 = left(gl.where(upto_BB, M_0 * -beta_0[None, :], 0.0), FINE)
    upto_BB = _upto(row_B, column_B + BLOCK, start_B, DOCUMENTS)
    M_1 = left(gl.where(upto_BB, M_1 * -beta_1[None, :], 0.0), FINE)

    # The inputs' dtype is as good: bf16 entries are fp16 ones as long as fp16 holds them.
    left_0, left_1 = left_block(q_0, q_0.dtype), left_block(q_1, q_1.dtype)
    k_00, k_01, k_10, k_11 = take(tokens, t_n + 1)
    l_0, l_1 = begin(left_0, left_1, transposed(k_00), transposed(k_01)), zeros_BB
    if HALF == 1:
        mbarrier.wait(ready.index(0), n & 1)
        l_1 = begin(left_0, left_1, transposed(k_10), transposed(k_11))
        l_0 = warpgroup_mma(M_1, transposed(XT_s.index(1)), l_0, is_async=True)
        l_1 = warpgroup_mma(M_1, transposed(XT_s.index(2)), l_1, is_async=True)
    l_0 = warpgroup_mma(M_0, transposed(XT_s.index(0)), l_0, is_async=True)
    l_0, l_1 = warpgroup_mma_wait(0, deps=[l_0, l_1])
    free(tokens, t_n + 1)

    Y_00, Y_01, Y_10, Y_11 = take(factors, f_n + 1)
    x_0, x_1 = sum_block(q_0), sum_block(q_1)
    free(tokens, t_n)
    x_0 = warpgroup_mma(M_0, Y_00, x_0, is_async=True)
    x_1 = warpgroup_mma(M_0, Y_01, x_1, is_async=True)
    if HALF == 1:
        x_0 = warpgroup_mma(M_1, Y_10, x_0, is_async=True)
        x_1 = warpgroup_mma(M_1, Y_11, x_1, is_async=True)
    row = (bh * tiles + a) * C + HALF * BLOCK
    tma.store_wait(0)
    l_0 = gl.where(inside_B1, l_0 * scale, 0.0)
    write(logits, row, 0, out_s.index(2 * HALF), l_0.to(FINE))
    if HALF == 1:
        l_1 = gl.where(inside_B1, l_1 * scale, 0.0)
        write(logits, row, BLOCK, out_s.index(3), l_1.to(FINE))
    x_0, x_1 = warpgroup_mma_wait(0, deps=[x_0, x_1])
    free(factors, f_n + 1)
    x_0 = gl.where(inside_B1, x_0 * scale, 0.0)
    x_1 = gl.where(inside_B1, x_1 * scale, 0.0)
    f_n += 2

    tile = bh * versions
    for level in range(levels):
        edge = (a >> level) << level
        if ((a >> level) % 2 == 1) & (first_a < edge):
            row = (tile + query_version(a, level, reach)) * C
            write_rows(q_versions, row, out_s, x_0, x_1, HALF)
            if first_a < edge - (1 << level):
                P_00, P_01, P_10, P_11 = take(factors, f_n)
                x_0, x_1 = times(x_0, x_1, P_00, P_01, P_10, P_11, FINE)
                free(factors, f_n)
                f_n += 1
        tile += versions_at(level, tiles, reach)
    return t_n + 2, f_n


@gluon.jit
def _of_columns(x, column_B):
    return gl.load(x + column_B), gl.load(x + BLOCK + column_B)


@gluon.jit
def _before(row_B, column_B, end_B, DOCUMENTS: gl.constexpr):
    """[rows, columns]: the row's token is an earlier one than the column's, of its document, which
    ends at `end_B`."""
    before_BB = row_B[:, None] < column_B[None, :]
    if DOCUMENTS:
        before_BB &= column_B[None, :] < end_B[:, None]
    return before_BB


@gluon.jit
def _upto(row_B, column_B, start_B, DOCUMENTS: gl.constexpr):
    """[rows, columns]: the row's token is the column's or a later one of its document, which starts
    at `start_B`."""
    upto_BB = row_B[:, None] >= column_B[None, :]
    if DOCUMENTS:
        upto_BB &= column_B[None, :] >= start_B[:, None]
    return upto_BB
