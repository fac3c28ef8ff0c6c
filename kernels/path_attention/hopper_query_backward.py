"""The gradient of queries on Hopper, with Householder maps and K = V = 128: what
triton_query_backward.py computes, by three groups of warps.

A producer loads what the others read, in its order and ahead of it, also across the tree's levels.
Two consumers own 64 of the tile's 128 queries each. While one makes ds of a block, the tensor cores
work for the other.

In shared memory, in KiB: queries' versions 2 x 32, of which one serves to write dq; a map 32;
blocks of keys and values 4 x 32, with what there is of their columns: with a gate its sums
(triton_gates.py), which rows of versions have too. The tile's do comes first, in the place of a
version, and goes to registers, its logits and values in that of blocks. At the end the map's place
holds X^T, and that of blocks the rest of what the way through the tile takes.
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

from mixtron.kernels.hopper_tools import (
    begin_square,
    fill,
    fill_with,
    free,
    left_operand,
    ring,
    take,
)
from mixtron.kernels.path_attention.hopper_query_tile import (
    COLUMN,
    ROW,
    finely,
    inside_tile,
    through_tile,
)
from mixtron.kernels.path_attention.hopper_walks import (
    OWN,
    WIDE,
    C,
    sums_of_threads,
    taken,
)
from mixtron.kernels.path_attention.triton_forward import LOG2_E
from mixtron.kernels.path_attention.triton_tree import (
    key_version,
    query_version,
    versions_at,
)

BLOCKS = gl.constexpr(4)
"""In shared memory."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)
VARYING = ("T", "S", "tiles", "levels", "reach", "versions", "nodes", "plane", "heads", "H")


@gluon.jit(do_not_specialize=VARYING)
def hopper_query_kernel(
    q, k, v, do, logits, maps, k_BTGK, w, XT, Y, dq_versions, dq_left, beta, less, after, until,
    start_S, less_LBHS, delta_BHS, dlogits, dM, dq, rows_BHS, scale,
    T, S, tiles, levels, reach, versions, nodes, plane, heads, H,
    R: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr, FINE: gl.constexpr,
):  # fmt: skip
    """A tile of 128 queries; sums of ds over columns are none of its business.

    The first twelve are descriptors of matrices with 128 columns (v, do and k_BTGK: a token's of
    all heads), in boxes of 64 rows, of maps and XT of 128, logits' FINE entries as q's dtype; then
    beta of [64]. With a gate, less and after of [64] of levels' planes [B H S], and until of [64]
    of the sums from tiles' left edges to tokens. The rest as in triton_query_backward.py.
    """
    k_ring, v_ring, map_ring = ring(k, BLOCKS, 2), ring(v, BLOCKS, 2), ring(maps, 1, 2)
    q_rings = ring(q, 2, 1), ring(q, 2, 1)
    of_columns = gl.allocate_shared_memory(beta.dtype, [BLOCKS, OWN], beta.layout)
    lesses = k_ring[0], k_ring[0]
    if GATE:
        lesses = _rows_of_versions(less), _rows_of_versions(less)
    fence_async_shared()
    rings = k_ring, v_ring, of_columns, map_ring, q_rings, lesses
    tree = tiles, levels, reach, versions, nodes
    sizes = T, S, plane, heads, H
    operands = q, k, v, do, logits, maps, k_BTGK, w, XT, Y, beta, less, after, until
    read = start_S, less_LBHS, delta_BHS
    written = dq_versions, dq_left, dlogits, dM, dq, rows_BHS
    shared = rings, read, written, tree, sizes
    gl.warp_specialize(
        [
            (_consume, (shared, scale, 0, R, GATE, DOCUMENTS, FINE)),
            (_consume, (shared, scale, 1, R, GATE, DOCUMENTS, FINE)),
            (_produce, (rings, operands, start_S, tree, sizes, R, GATE, DOCUMENTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _rows_of_versions(less):
    return gl.allocate_shared_memory(less.dtype, [2, OWN], less.layout)


@gluon.jit
def _produce(
    rings, operands, start_S, tree, sizes,
    R: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Loads the tile's operands. A version and its map come after the first blocks of the walk
    before: by then what they overwrite is not in use any more."""
    k_ring, v_ring, of_columns, map_ring, q_rings, lesses = rings
    q, k, v, do, logits, maps, k_BTGK, w, XT, Y, beta, less, after, until = operands
    tiles, levels, reach, versions, nodes = tree
    T, S, plane, _, H = sizes
    turn, bh = taken()
    a, b, h = tiles - 1 - turn, bh // H, bh % H
    g, G = h // R, H // R
    first, tile = b * T + a * C, bh * S + a * C
    for i in gl.static_range(2):
        fill(q_rings[i], 0, do, [first + i * OWN, h * C])
        fill(k_ring, i, logits, [tile + i * OWN, 0])
        value = [first + i * OWN, g * C]
        if GATE:
            # In place of a block's sums, what the tile's own keys lie before.
            fill_with(v_ring, i, v, value, of_columns, until, [tile + i * OWN])
        else:
            fill(v_ring, i, v, value)
    blocks = k, v, after, g
    low = _low(start_S, a, DOCUMENTS)
    own, shared = bh * versions + versions, (b * G + g) * versions + versions
    map_row = (b * G + g) * nodes + nodes
    n, walks = 0 * a + 2, 0 * a
    key, token, gate, count = 0 * a, 0 * a, 0 * a, 0 * a
    for i in range(levels):
        level = levels - 1 - i
        room = versions_at(level, tiles, reach)
        own, shared, map_row = own - room, shared - room, map_row - (tiles >> level)
        edge = (a >> level) << level
        if ((a >> level) % 2 == 1) & (low < edge * C):
            version = (own + query_version(a, level, reach)) * C
            for half in gl.static_range(2):
                row = [version + half * OWN, 0]
                if GATE:
                    rows = [level * plane + tile + half * OWN]
                    fill_with(q_rings[half], walks + 1, q, row, lesses[half], less, rows)
                else:
                    fill(q_rings[half], walks + 1, q, row)
            if walks > 0:
                fill(map_ring, walks - 1, maps, [(map_row + (a >> level) - 1) * C, 0])
            walks += 1
            n = _load_blocks(rings, n, blocks, key, token, gate, count, GATE)
            lo = gl.maximum((edge - (1 << level)) * C, low)
            row_0 = shared + key_version(edge - 1, level, reach) - (edge - 1)
            key, token, gate = row_0 * C + lo, b * T + lo, level * plane + bh * S + lo
            count = (edge * C - lo) // OWN
            soon = gl.minimum(count, BLOCKS)
            n = _load_blocks(rings, n, blocks, key, token, gate, soon, GATE)
            key, token, gate = key + soon * OWN, token + soon * OWN, gate + soon * OWN
            count -= soon
    n = _load_blocks(rings, n, blocks, key, token, gate, count, GATE)
    shared = ((b * G + g) * tiles + a) * C
    fill(map_ring, gl.maximum(walks - 1, 0), XT, [shared, 0])
    for i in gl.static_range(2):
        row = shared + i * OWN
        fill_with(v_ring, n + i, Y, [row, 0], of_columns, beta, [row])
    for i in gl.static_range(2):
        fill(k_ring, n + i, k_BTGK, [first + i * OWN, g * C])
    fill(k_ring, n + 2, w, [shared, 0])
    fill(v_ring, n + 2, w, [shared + OWN, 0])


@gluon.jit
def _load_blocks(rings, n, blocks, key, token, gate, count, GATE: gl.constexpr):
    """Blocks of keys, from row `key` on, and of what belongs to them. Returns the rings' next."""
    k_ring, v_ring, of_columns, _, _, _ = rings
    k, v, after, g = blocks
    for i in range(count):
        fill(k_ring, n + i, k, [key + i * OWN, 0])
        value = [token + i * OWN, g * C]
        if GATE:
            fill_with(v_ring, n + i, v, value, of_columns, after, [gate + i * OWN])
        else:
            fill(v_ring, n + i, v, value)
    return n + count


@gluon.jit
def _consume(
    shared, scale, half: gl.constexpr, R: gl.constexpr, GATE: gl.constexpr,
    DOCUMENTS: gl.constexpr, FINE: gl.constexpr,
):  # fmt: skip
    """The tile's queries half * OWN .. ."""
    rings, read, written, tree, sizes = shared
    _, _, _, map_ring, q_rings, lesses = rings
    start_S, less_LBHS, delta_BHS = read
    dq_versions, dq_left, _, _, _, rows_BHS = written
    tiles, levels, reach, versions, _ = tree
    T, S, _, heads, H = sizes
    q_ring = q_rings[half]
    turn, bh = taken()
    a, b, h = tiles - 1 - turn, bh // H, bh % H
    of_head = bh.to(gl.int64) * S
    t_Q = a * C + half * OWN + gl.arange(0, OWN, ROW)
    less_Q, delta_Q = gl.load(less_LBHS + of_head + t_Q), gl.load(delta_BHS + of_head + t_Q)
    start_Q, latest = 0 * t_Q, 0 * a
    low = _low(start_S, a, DOCUMENTS)
    if DOCUMENTS:
        start_Q = gl.load(start_S + t_Q)
        # Only before it are keys of other documents.
        latest = gl.load(start_S + a * C + half * OWN + OWN - 1)
    # No weights behind the last token, whatever lies there.
    less_Q = gl.where(t_Q < T, less_Q, float("inf"))
    # In registers, because products of 64 x 64 from shared memory alone read all that it gives.
    do_QV = take(q_ring, 0).load(left_operand(OWN))
    free(q_ring, 0)
    of_rows = t_Q, less_Q, delta_Q, start_Q
    sum_Q = inside_tile(do_QV, of_rows, a, of_head, half, shared, GATE, FINE)

    dq_QK = gl.zeros([OWN, C], gl.float32, WIDE)
    own, n, walks = bh * versions + versions, 0 * a + 2, 0 * a
    for i in range(levels):
        level = levels - 1 - i
        own -= versions_at(level, tiles, reach)
        edge = (a >> level) << level
        if ((a >> level) % 2 == 1) & (low < edge * C):
            if walks > 0:
                version = (own + query_version(a, level, reach)) * C
                _write(dq_versions, version + half * OWN, q_ring, walks, dq_QK)
                map_KK = take(map_ring, walks - 1)
                zeros_QK = gl.zeros([OWN, C], gl.float32, WIDE)
                dq_QK = finely(zeros_QK, dq_QK, map_KK.permute((1, 0)))
                free(map_ring, walks - 1)
                tma.store_wait(0)
                free(q_ring, walks)
            lo = gl.maximum((edge - (1 << level)) * C, low)
            walks += 1
            q_QK = take(q_ring, walks)
            if GATE:
                less_Q = lesses[half].index(walks % 2).load(ROW)
                less_Q = gl.where(t_Q < T, less_Q, float("inf"))
            of_rows = t_Q, less_Q, delta_Q, start_Q
            dq_QK, sum_Q = _walk(
                dq_QK, sum_Q, q_QK, do_QV, of_rows, latest, lo, edge * C, rings, n,
                GATE, DOCUMENTS,
            )  # fmt: skip
            n += (edge * C - lo) // OWN
    _write(dq_left, bh * S + a * C + half * OWN, q_ring, walks, dq_QK)
    if GATE:
        gl.store(rows_BHS + of_head + t_Q, gl.convert_layout(gl.sum(sum_Q, 1), ROW))
    token_Q = (b.to(gl.int64) * T + t_Q) * heads + h
    places = of_head + a * C, token_Q
    map_n = gl.maximum(walks - 1, 0)
    through_tile(dq_QK, of_rows, places, scale, a, n, map_n, half, shared)
    tma.store_wait(0)


@gluon.jit
def _walk(
    dq_QK, sum_Q, q_QK, do_QV, of_rows, latest, lo, hi, rings, n,
    GATE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """The key blocks lo .. hi, all before the queries."""
    k_ring, v_ring, of_columns, _, _, _ = rings
    delta_Q = of_rows[2]
    LEFT: gl.constexpr = left_operand(C)
    count = (hi - lo) // OWN
    k_BK = take(k_ring, n)
    s_QB, dp_QB = _logits(q_QK, k_BK), _logits(do_QV, take(v_ring, n))
    s_QB = warpgroup_mma_wait(1, deps=[s_QB])
    p_QB = _weights(s_QB, of_columns.index(n % BLOCKS), lo, latest, of_rows, GATE, DOCUMENTS)
    dp_QB = warpgroup_mma_wait(0, deps=[dp_QB])
    free(v_ring, n)
    ds_QB = p_QB * (dp_QB - delta_Q[:, None])
    if GATE:
        sum_Q += sums_of_threads(ds_QB)
    ds_QB = gl.convert_layout(ds_QB.to(k_BK.dtype), LEFT)
    for i in range(1, count):
        first = lo + i * OWN
        next_BK = take(k_ring, n + i)
        s_QB, dp_QB = _logits(q_QK, next_BK), _logits(do_QV, take(v_ring, n + i))
        dq_QK = warpgroup_mma(ds_QB, k_BK, dq_QK, is_async=True)
        after = of_columns.index((n + i) % BLOCKS)
        s_QB = warpgroup_mma_wait(2, deps=[s_QB])
        p_QB = _weights(s_QB, after, first, latest, of_rows, GATE, DOCUMENTS)
        dp_QB = warpgroup_mma_wait(1, deps=[dp_QB])
        free(v_ring, n + i)
        next_QB = p_QB * (dp_QB - delta_Q[:, None])
        if GATE:
            sum_Q += sums_of_threads(next_QB)
        ds_QB = gl.convert_layout(next_QB.to(k_BK.dtype), LEFT)
        k_BK = next_BK
        dq_QK = warpgroup_mma_wait(0, deps=[dq_QK])
        free(k_ring, n + i - 1)
    dq_QK = warpgroup_mma(ds_QB, k_BK, dq_QK)
    free(k_ring, n + count - 1)
    return dq_QK, sum_Q


@gluon.jit
def _logits(x_QK, y_BK):
    """Begins x y^T."""
    return begin_square(x_QK, y_BK.permute((1, 0)))


@gluon.jit
def _weights(s_QB, after, first, latest, of_rows, GATE: gl.constexpr, DOCUMENTS: gl.constexpr):
    _, less_Q, _, start_Q = of_rows
    s_QB = s_QB * LOG2_E
    if GATE:
        s_QB += after.load(COLUMN)[None, :]
    if DOCUMENTS:  # noqa: SIM102 (one of the two is decided when it is compiled)
        if first < latest:
            u_B = first + gl.arange(0, OWN, COLUMN)
            s_QB = gl.where(u_B[None, :] >= start_Q[:, None], s_QB, float("-inf"))
    return gl.exp2(s_QB - less_Q[:, None])


@gluon.jit
def _write(matrix, row, q_ring, n, x_QK):
    """Begins to write rows of a matrix, through the place of a version that is done with."""
    through = q_ring[0].index(n % 2)
    through.store(x_QK.to(matrix.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(matrix, [row, 0], through)


@gluon.jit
def _low(start_S, a, DOCUMENTS: gl.constexpr):
    """Where the first block of keys of a tile's queries starts."""
    if DOCUMENTS:
        return gl.load(start_S + a * C) // OWN * OWN
    return 0 * a
