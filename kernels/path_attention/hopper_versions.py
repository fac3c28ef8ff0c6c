"""Queries and keys in versions on an H100 or H200 (hopper_tiles.py): what triton_maps.py's version
kernels compute.

In shared memory: two tiles of tokens, four of the maps' factors and maps, and one that waits to be
written, of 32 KiB each.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mixtron.kernels.path_attention.hopper_tiles import (
    BLOCK,
    COLUMN,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROW,
    SQUARE,
    C,
    begin,
    fill,
    fill_triangle,
    free,
    left,
    of_pair,
    pairs,
    ring,
    take,
    take_rows,
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

TOKENS, FACTORS = gl.constexpr(2), gl.constexpr(4)
"""Slots of the rings."""
VARYING = ("T", "H", "G", "heads", "tiles", "levels", "reach", "versions", "nodes")


@gluon.jit(do_not_specialize=VARYING)
def hopper_key_version_kernel(
    k, w, L, maps, XT, k_versions, beta, start_S, end_S,
    T, G, heads, tiles, levels, reach, versions, nodes,
    FINE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """X^T of all tiles of `heads` key/value heads, and their keys in versions.

    The first six are descriptors of matrices in boxes of 64 x 64: k of [B T, G K], w of
    [B G S, K], L and XT of [B G S, C], maps of [B G nodes K, K], k_versions of [B G versions C, K];
    XT's FINE entries as k's dtype.
    """
    rings = ring(k, TOKENS), ring(w, FACTORS)
    out_s = gl.allocate_shared_memory(k.dtype, [4, BLOCK, BLOCK], k.layout)
    fence_async_shared()
    sizes = T, G, heads, tiles
    tree = levels, reach, versions, nodes
    consumed = rings, out_s, (beta, start_S, end_S), (XT, k_versions), sizes, tree
    gl.warp_specialize(
        [
            (_carry_keys, (consumed, 0, FINE, DOCUMENTS)),
            (_carry_keys, (consumed, 1, FINE, DOCUMENTS)),
            (_copy_for_keys, (rings, (k, w, L, maps, end_S), sizes, tree, DOCUMENTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit(do_not_specialize=VARYING)
def hopper_query_version_kernel(
    q, k, w, XT, Y, maps, logits, q_versions, beta, start_S, scale,
    T, H, G, heads, tiles, levels, reach, versions, nodes,
    FINE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Logits inside all tiles of `heads` query heads, and their versions.

    The first eight are descriptors like those of keys: q of [B T, H K], Y of [B G S, K], logits of
    [B H S, C], q_versions of [B H versions C, K]; logits' FINE entries as q's dtype.
    """
    rings = ring(q, TOKENS), ring(w, FACTORS)
    out_s = gl.allocate_shared_memory(q.dtype, [4, BLOCK, BLOCK], q.layout)
    fence_async_shared()
    sizes = T, H, G, heads, tiles
    tree = levels, reach, versions, nodes
    consumed = rings, out_s, (beta, start_S, scale), (logits, q_versions), sizes, tree
    operands = q, k, w, XT, Y, maps, start_S
    gl.warp_specialize(
        [
            (_carry_queries, (consumed, 0, FINE, DOCUMENTS)),
            (_carry_queries, (consumed, 1, FINE, DOCUMENTS)),
            (_copy_for_queries, (rings, operands, sizes, tree, DOCUMENTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _copy_for_keys(rings, operands, sizes, tree, DOCUMENTS: gl.constexpr):
    tokens, factors = rings
    k, w, L, maps, end_S = operands
    T, G, heads, tiles = sizes
    levels, _, _, nodes = tree
    t_n, f_n = gl.to_tensor(0), gl.to_tensor(0)
    for pair in range(gl.program_id(0), pairs(tiles) * heads, gl.num_programs(0)):
        bg, begin_c, end_c, step = of_pair(pair, tiles)
        for c in range(begin_c, end_c, step):
            last = last_tile(end_S, c, tiles, C, DOCUMENTS)
            own = (bg * tiles + c) * C
            fill(tokens, t_n, k, bg // G * T + c * C, bg % G * C)
            fill(factors, f_n, w, own, 0)
            fill_triangle(factors, f_n + 1, L, own, 1)
            t_n += 1
            f_n += 2
            map_row = bg * nodes
            for level in range(levels):
                edge = ((c >> level) + 1) << level
                if ((c >> level) % 2 == 0) & (edge + (1 << level) <= last):
                    fill(factors, f_n, maps, (map_row + (c >> level) + 1) * C, 0)
                    f_n += 1
                map_row += tiles >> level


@gluon.jit
def _copy_for_queries(rings, operands, sizes, tree, DOCUMENTS: gl.constexpr):
    tokens, factors = rings
    q, k, w, XT, Y, maps, start_S = operands
    T, H, G, heads, tiles = sizes
    levels, _, _, nodes = tree
    t_n, f_n = gl.to_tensor(0), gl.to_tensor(0)
    for pair in range(gl.program_id(0), pairs(tiles) * heads, gl.num_programs(0)):
        bh, begin_a, end_a, step = of_pair(pair, tiles)
        b, h = bh // H, bh % H
        g = h // (H // G)
        for a in range(begin_a, end_a, step):
            first_a = first_tile(start_S, a, C, DOCUMENTS)
            token, own = b * T + a * C, ((b * G + g) * tiles + a) * C
            fill(tokens, t_n, q, token, h * C)
            fill(factors, f_n, w, own, 0)
            fill(tokens, t_n + 1, k, token, g * C)
            fill_triangle(factors, f_n + 1, XT, own, 0)
            fill(factors, f_n + 2, Y, own, 0)
            t_n += 2
            f_n += 3
            map_row = (b * G + g) * nodes
            for level in range(levels):
                edge = (a >> level) << level
                if ((a >> level) % 2 == 1) & (first_a < edge - (1 << level)):
                    fill(factors, f_n, maps, (map_row + (a >> level) - 1) * C, 0)
                    f_n += 1
                map_row += tiles >> level


@gluon.jit
def _carry_keys(consumed, HALF: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr):
    """Rows of X^T and keys of half of every tile. The second half's rows of X^T begin with zeros:
    what these are multiplied with is left out."""
    rings, out_s, inputs, outputs, sizes, tree = consumed
    tokens, factors = rings
    beta, start_S, end_S = inputs
    XT, k_versions = outputs
    T, _G, heads, tiles = sizes
    levels, reach, versions, _nodes = tree
    row_B, column_B = gl.arange(0, BLOCK, ROW) + HALF * BLOCK, gl.arange(0, BLOCK, COLUMN)
    zeros_BB = gl.zeros([BLOCK, BLOCK], gl.float32, SQUARE)
    t_n, f_n = gl.to_tensor(0), gl.to_tensor(0)
    for pair in range(gl.program_id(0), pairs(tiles) * heads, gl.num_programs(0)):
        bg, begin_c, end_c, step = of_pair(pair, tiles)
        for c in range(begin_c, end_c, step):
            first, own = c * C, (bg * tiles + c) * C
            last = last_tile(end_S, c, tiles, C, DOCUMENTS)
            beta_0, beta_1 = _of_columns(beta + own, column_B)
            start_0, start_1 = column_B, column_B
            if DOCUMENTS:
                start_0, start_1 = _of_columns(start_S + first, column_B)
            inside_B1 = (first + row_B < T)[:, None]
            k_0, k_1 = take_rows(tokens, t_n, HALF)
            left_0, left_1 = left(k_0, FINE), left(k_1, FINE)

            # B = tril(W K^T, -1), transposed.
            w_00, w_01, w_10, w_11 = take(factors, f_n)
            B_0 = zeros_BB
            B_1 = begin(left_0, left_1, transposed(w_10), transposed(w_11))
            if HALF == 0:
                B_0 = begin(left_0, left_1, transposed(w_00), transposed(w_01))
            B_0, B_1 = warpgroup_mma_wait(0, deps=[B_0, B_1])
            before_BB = _before(row_B, column_B + BLOCK, first, start_1, DOCUMENTS)
            B_1 = left(gl.where(before_BB & inside_B1, B_1, 0.0), FINE)
            L_00, L_10, L_11, _empty = take(factors, f_n + 1)
            X_0 = zeros_BB
            X_1 = warpgroup_mma(B_1, transposed(L_11), zeros_BB, use_acc=False, is_async=True)
            if HALF == 0:
                before_BB = _before(row_B, column_B, first, start_0, DOCUMENTS)
                B_0 = left(gl.where(before_BB & inside_B1, B_0, 0.0), FINE)
                X_1 = warpgroup_mma(B_0, transposed(L_10), X_1, is_async=True)
                X_0 = warpgroup_mma(B_0, transposed(L_00), zeros_BB, use_acc=False, is_async=True)
            X_0, X_1 = warpgroup_mma_wait(0, deps=[X_0, X_1])
            free(factors, f_n + 1)

            x_0, x_1 = k_0.to(gl.float32), k_1.to(gl.float32)
            left_1 = left(X_1 * -beta_1[None, :], FINE)
            x_0 = warpgroup_mma(left_1, w_10, x_0, is_async=True)
            x_1 = warpgroup_mma(left_1, w_11, x_1, is_async=True)
            if HALF == 0:
                left_0 = left(X_0 * -beta_0[None, :], FINE)
                x_0 = warpgroup_mma(left_0, w_00, x_0, is_async=True)
                x_1 = warpgroup_mma(left_0, w_01, x_1, is_async=True)
            tma.store_wait(0)
            if HALF == 0:
                write(XT, own, 0, out_s.index(0), X_0.to(FINE))
            write(XT, own + HALF * BLOCK, BLOCK, out_s.index(2 * HALF + 1), X_1.to(FINE))
            x_0, x_1 = warpgroup_mma_wait(0, deps=[x_0, x_1])
            free(factors, f_n)
            t_n += 1
            f_n += 2

            version_row = bg * versions
            for level in range(levels):
                edge = ((c >> level) + 1) << level
                if ((c >> level) % 2 == 0) & (edge <= last):
                    row = (version_row + key_version(c, level, reach)) * C
                    write_rows(k_versions, row, out_s, x_0, x_1, HALF)
                    if edge + (1 << level) <= last:
                        P_00, P_01, P_10, P_11 = take(factors, f_n)
                        P_00, P_01 = transposed(P_00), transposed(P_01)
                        P_10, P_11 = transposed(P_10), transposed(P_11)
                        x_0, x_1 = times(x_0, x_1, P_00, P_10, P_01, P_11, FINE)
                        free(factors, f_n)
                        f_n += 1
                version_row += versions_at(level, tiles, reach)
    tma.store_wait(0)


@gluon.jit
def _carry_queries(consumed, HALF: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr):
    """Logits and queries of half of every tile. The first half's rows of M end with zeros: what
    these are multiplied with is left out, and logits that no query sees."""
    rings, out_s, inputs, outputs, sizes, tree = consumed
    tokens, factors = rings
    beta, start_S, scale = inputs
    logits, q_versions = outputs
    T, H, G, heads, tiles = sizes
    levels, reach, versions, _nodes = tree
    row_B, column_B = gl.arange(0, BLOCK, ROW) + HALF * BLOCK, gl.arange(0, BLOCK, COLUMN)
    zeros_BB = gl.zeros([BLOCK, BLOCK], gl.float32, SQUARE)
    t_n, f_n = gl.to_tensor(0), gl.to_tensor(0)
    for pair in range(gl.program_id(0), pairs(tiles) * heads, gl.num_programs(0)):
        bh, begin_a, end_a, step = of_pair(pair, tiles)
        bg = bh // H * G + bh % H // (H // G)
        for a in range(begin_a, end_a, step):
            first, own = a * C, (bg * tiles + a) * C
            first_a = first_tile(start_S, a, C, DOCUMENTS)
            beta_0, beta_1 = _of_columns(beta + own, column_B)
            start_B = row_B
            if DOCUMENTS:
                start_B = gl.load(start_S + first + row_B)
            inside_B1 = (first + row_B < T)[:, None]
            q_0, q_1 = take_rows(tokens, t_n, HALF)
            fine_0, fine_1 = left(q_0, FINE), left(q_1, FINE)

            w_00, w_01, w_10, w_11 = take(factors, f_n)
            M_0, M_1 = begin(fine_0, fine_1, transposed(w_00), transposed(w_01)), zeros_BB
            if HALF == 1:
                M_1 = begin(fine_0, fine_1, transposed(w_10), transposed(w_11))
            M_0, M_1 = warpgroup_mma_wait(0, deps=[M_0, M_1])
            free(factors, f_n)
            upto_BB = _upto(row_B, column_B, first, start_B, DOCUMENTS)
            M_0 = left(gl.where(upto_BB, M_0 * -beta_0[None, :], 0.0), FINE)
            upto_BB = _upto(row_B, column_B + BLOCK, first, start_B, DOCUMENTS)
            M_1 = left(gl.where(upto_BB, M_1 * -beta_1[None, :], 0.0), FINE)

            # The inputs' dtype is as good: bf16 entries are fp16 ones as long as fp16 holds them.
            q_0, q_1 = left(q_0, q_0.dtype), left(q_1, q_1.dtype)
            k_00, k_01, k_10, k_11 = take(tokens, t_n + 1)
            l_0, l_1 = begin(q_0, q_1, transposed(k_00), transposed(k_01)), zeros_BB
            XT_00, XT_01, XT_11, _empty = take(factors, f_n + 1)
            l_0 = warpgroup_mma(M_0, transposed(XT_00), l_0, is_async=True)
            if HALF == 1:
                l_1 = begin(q_0, q_1, transposed(k_10), transposed(k_11))
                l_0 = warpgroup_mma(M_1, transposed(XT_01), l_0, is_async=True)
                l_1 = warpgroup_mma(M_1, transposed(XT_11), l_1, is_async=True)
            l_0, l_1 = warpgroup_mma_wait(0, deps=[l_0, l_1])
            free(tokens, t_n + 1)
            free(factors, f_n + 1)

            Y_00, Y_01, Y_10, Y_11 = take(factors, f_n + 2)
            x_0 = warpgroup_mma(M_0, Y_00, _sum(fine_0), is_async=True)
            x_1 = warpgroup_mma(M_0, Y_01, _sum(fine_1), is_async=True)
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
            free(factors, f_n + 2)
            x_0 = gl.where(inside_B1, x_0 * scale, 0.0)
            x_1 = gl.where(inside_B1, x_1 * scale, 0.0)
            t_n += 2
            f_n += 3

            version_row = bh * versions
            for level in range(levels):
                edge = (a >> level) << level
                if ((a >> level) % 2 == 1) & (first_a < edge):
                    row = (version_row + query_version(a, level, reach)) * C
                    write_rows(q_versions, row, out_s, x_0, x_1, HALF)
                    if first_a < edge - (1 << level):
                        P_00, P_01, P_10, P_11 = take(factors, f_n)
                        x_0, x_1 = times(x_0, x_1, P_00, P_01, P_10, P_11, FINE)
                        free(factors, f_n)
                        f_n += 1
                version_row += versions_at(level, tiles, reach)
    tma.store_wait(0)


@gluon.jit
def _sum(x_BB):
    """A left operand as what products are added to."""
    return gl.convert_layout(x_BB, SQUARE).to(gl.float32)


@gluon.jit
def _of_columns(x, column_B):
    return gl.load(x + column_B), gl.load(x + BLOCK + column_B)


@gluon.jit
def _before(row_B, column_B, first, start_B, DOCUMENTS: gl.constexpr):
    """[rows, columns]: the row's token is an earlier one than the column's, of its document."""
    before_BB = row_B[:, None] < column_B[None, :]
    if DOCUMENTS:
        before_BB = before_BB & ((first + row_B)[:, None] >= start_B[None, :])
    return before_BB


@gluon.jit
def _upto(row_B, column_B, first, start_B, DOCUMENTS: gl.constexpr):
    """[rows, columns]: the row's token is the column's or a later one of its document."""
    upto_BB = row_B[:, None] >= column_B[None, :]
    if DOCUMENTS:
        upto_BB = upto_BB & ((first + column_B)[None, :] >= start_B[:, None])
    return upto_BB
