"""The gradient of keys and values on Hopper, with Householder maps and K = V = 128: what
triton_backward.py's key_kernel computes, by three groups of warps.

A producer loads what the others read, in its order and ahead of it, also across the tree's levels.
Two consumers own 64 of the tile's 128 keys each. For each block of queries, with the sums in
registers,

    s = k q^T,   dp = v do^T - delta,   p = exp2(s - less),   dv += p do,   ds = p dp,   dk += ds q

p and ds go from registers into their products. While one consumer makes them, the tensor cores work
for the other.

In shared memory, in KiB: keys' versions 2 x 32, of which one serves to write gradients; values 32;
a map 32; blocks of queries (or of logits inside the tile) and do 3 x 32, their rows' scalars 1.5.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mixtron.kernels.hopper_tools import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    fill,
    fill_halves,
    free,
    free_half,
    half_of,
    halves,
    left_operand,
    ring,
    take,
    take_half,
)
from mixtron.kernels.path_attention.hopper_walks import (
    OWN,
    PAIRS,
    WIDE,
    C,
    sums_of_threads,
    taken,
)
from mixtron.kernels.path_attention.triton_forward import LOG2_E
from mixtron.kernels.path_attention.triton_tree import (
    key_version,
    last_tile,
    query_version,
    versions_at,
)

BLOCKS = gl.constexpr(3)
"""In shared memory."""
LEFT = gl.constexpr(left_operand(128))
KEY = gl.constexpr(gl.SliceLayout(1, PAIRS))
QUERY = gl.constexpr(gl.SliceLayout(0, PAIRS))
VARYING = ("T", "tiles", "levels", "reach", "versions", "nodes", "plane", "H")


@gluon.jit(do_not_specialize=VARYING)
def hopper_key_kernel(
    q, k, v, logits, maps, do, less, delta, dk, dk_versions, dv,
    after_LBHS, until_BHS, start_S, end_S, columns_PBHS,
    T, tiles, levels, reach, versions, nodes, plane, H,
    R: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr, FINE: gl.constexpr,
):  # fmt: skip
    """The gradients of a tile of 128 keys and of its values.

    By descriptors: boxes [64, 128] of q and k in versions, of logits (as q's dtype, FINE ones), dk
    and dk_versions, [128, 128] of maps, each a matrix of 128 columns; [1, 64, 128] of v, do and dv
    [B, T, heads V], which have zeros behind T; [64] of delta [B H S] and of less, with a gate of
    levels' planes. Sums of ds over columns come in a plane of columns_PBHS for each level and one
    of tiles' insides, but where each query head has its own keys in one. The rest as in key_kernel.
    """
    rings = halves(k, 2), halves(v, 1), ring(maps, 1, 2), _blocks(q, do, less, delta)
    by_turns = barriers(2, 1)
    fence_async_shared()
    sources, tree = (q, k, v, logits, maps, do, less, delta), (levels, reach, versions, nodes, H)
    scalars = after_LBHS, until_BHS, start_S, columns_PBHS, plane, by_turns
    sizes = T, tiles, end_S
    consumed = rings, scalars, (dk, dk_versions, dv), sizes, (levels, reach, versions, H)
    gl.warp_specialize(
        [
            (_consume, (consumed, 0, R, GATE, DOCUMENTS, FINE)),
            (_consume, (consumed, 1, R, GATE, DOCUMENTS, FINE)),
            (_produce, (rings, sources, sizes, tree, plane, R, GATE, DOCUMENTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _blocks(q, do, less, delta):
    """A ring of blocks of queries, with do and the rows' scalars."""
    queries = gl.allocate_shared_memory(q.dtype, [BLOCKS, OWN, C], q.layout)
    outputs = gl.allocate_shared_memory(do.dtype, [BLOCKS, 1, OWN, C], do.layout)
    of_less = gl.allocate_shared_memory(less.dtype, [BLOCKS, OWN], less.layout)
    of_delta = gl.allocate_shared_memory(delta.dtype, [BLOCKS, OWN], delta.layout)
    return queries, outputs, of_less, of_delta, barriers(BLOCKS, 1), barriers(BLOCKS, 2)


@gluon.jit
def _place(sizes, DOCUMENTS: gl.constexpr):
    """A program's tile and key/value head, behind which queries no one sees the keys, and the last
    tile of queries that do."""
    T, tiles, end_S = sizes
    a, bg = taken()
    end = gl.cdiv(T, OWN) * OWN
    if DOCUMENTS:
        end = gl.cdiv(gl.load(end_S + (gl.minimum(a * C + C, T) - 1)), OWN) * OWN
    return a, bg, end, last_tile(end_S, a, tiles, C, DOCUMENTS)


@gluon.jit
def _produce(
    rings, sources, sizes, tree, plane, R: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr
):
    k_ring, v_ring, map_ring, block_ring = rings
    q, k, v, logits, maps, do, less, delta = sources
    tiles = sizes[1]
    levels, reach, versions, nodes, H = tree
    a, bg, end, last = _place(sizes, DOCUMENTS)
    b, h = bg // (H // R), bg % (H // R) * R
    fill_halves(v_ring, 0, v, [b, a * C, h // R * C], [b, a * C + OWN, h // R * C])
    k_n, block_n = gl.to_tensor(0), gl.to_tensor(0)
    below, nodes_below = versions, nodes
    for level in range(levels - 1, -1, -1):
        below = below - versions_at(level, tiles, reach)
        nodes_below = nodes_below - (tiles >> level)
        edge = ((a >> level) + 1) << level
        behind = edge + (1 << level)
        if ((a >> level) % 2 == 0) & (edge <= last):
            row = (bg * versions + below + key_version(a, level, reach)) * C
            fill_halves(k_ring, k_n, k, [row, 0], [row + OWN, 0])
            if behind <= last:
                # Each version but the first, from the farthest edge, is behind a map.
                node = bg * nodes + nodes_below + (a >> level) + 1
                fill(map_ring, k_n - 1, maps, [node * C, 0])
            k_n = k_n + 1
            of_level = 0
            if GATE:
                of_level = level * plane
            for r in range(R):
                row = (bg * R + r) * versions + below + query_version(edge, level, reach) - edge
                for t in range(edge * C, gl.minimum(behind * C, end), OWN):
                    token = (bg * R + r) * tiles * C + t
                    of_rows = do, [b, t, (h + r) * C], less, of_level + token, delta, token
                    _fill_block(block_ring, block_n, q, row * C + t, of_rows)
                    block_n = block_n + 1
    for r in range(R):
        for t in range(a * C, a * C + C, OWN):
            row = (bg * R + r) * tiles * C + t
            of_rows = do, [b, t, (h + r) * C], less, row, delta, row
            _fill_block(block_ring, block_n, logits, row, of_rows)
            block_n = block_n + 1


@gluon.jit
def _fill_block(ring, n, q, row, of_rows):
    queries, outputs, of_less, of_delta, fulls, empty = ring
    do, place, less, of_less_at, delta, of_delta_at = of_rows
    slot = n % BLOCKS
    full = fulls.index(slot)
    mbarrier.wait(empty.index(slot), ((n // BLOCKS) & 1) ^ 1)
    nbytes: gl.constexpr = q.block_type.nbytes + do.block_type.nbytes
    mbarrier.expect(full, nbytes + less.block_type.nbytes + delta.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [row, 0], full, queries.index(slot))
    tma.async_copy_global_to_shared(do, place, full, outputs.index(slot))
    tma.async_copy_global_to_shared(less, [of_less_at], full, of_less.index(slot))
    tma.async_copy_global_to_shared(delta, [of_delta_at], full, of_delta.index(slot))


@gluon.jit
def _consume(
    consumed, half: gl.constexpr, R: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr,
    FINE: gl.constexpr,
):  # fmt: skip
    """The tile's keys half * OWN .. ."""
    rings, scalars, gradients, sizes, tree = consumed
    k_ring, v_ring, map_ring, block_ring = rings
    after_LBHS, until_BHS, start_S, columns_PBHS, plane, by_turns = scalars
    dk, dk_versions, dv = gradients
    T, tiles, end_S = sizes
    levels, reach, versions, H = tree
    a, bg, end, last = _place(sizes, DOCUMENTS)
    u_K = a * C + half * OWN + gl.arange(0, OWN, KEY)
    dk_KK = gl.zeros([OWN, C], gl.float32, WIDE)
    dv_KV = gl.zeros([OWN, C], gl.float32, WIDE)
    v_KV = take_half(v_ring, 0, half).reshape([OWN, C])
    # Only from its end on are queries of another document than the first key's.
    own_end = end
    if DOCUMENTS:
        own_end = gl.load(end_S + gl.minimum(a * C, T - 1))
    if half == 1:
        # The other one has the first turn.
        mbarrier.arrive(by_turns.index(0))
    column_K = gl.zeros([OWN], gl.float32, KEY)
    k_n, block_n = gl.to_tensor(0), gl.to_tensor(0)
    below = bg * versions + versions
    for level in range(levels - 1, -1, -1):
        below = below - versions_at(level, tiles, reach)
        edge = ((a >> level) + 1) << level
        behind = edge + (1 << level)
        if ((a >> level) % 2 == 0) & (edge <= last):
            after_K = _after(after_LBHS, level * plane + bg * R * tiles * C + u_K, GATE)
            if behind <= last:
                row = (below + key_version(a, level, reach)) * C + half * OWN
                _write(dk_versions, [row, 0], half_of(k_ring, k_n - 1, half), dk_KK)
                dk_KK = _carried(dk_KK, take(map_ring, k_n - 1))
                free(map_ring, k_n - 1)
                tma.store_wait(0)
                free_half(k_ring, k_n - 1)
            k_KK = take_half(k_ring, k_n, half)
            k_n = k_n + 1
            for r in range(R):
                place_K = level * plane + (bg * R + r) * tiles * C + u_K
                if R > 1:
                    column_K = gl.zeros([OWN], gl.float32, KEY)
                    if r > 0:
                        after_K = _after(after_LBHS, place_K, GATE)
                dk_KK, dv_KV, column_K, block_n = _walk(
                    dk_KK, dv_KV, column_K, k_KK, v_KV, block_ring, block_n, after_K, by_turns,
                    u_K, start_S, own_end, edge * C, gl.minimum(behind * C, end),
                    half, GATE, DOCUMENTS,
                )  # fmt: skip
                if GATE and R > 1:
                    gl.store(columns_PBHS + place_K, column_K)
        elif GATE and R > 1:
            for r in range(R):
                place_K = level * plane + (bg * R + r) * tiles * C + u_K
                gl.store(columns_PBHS + place_K, gl.zeros([OWN], gl.float32, KEY))
    staged = half_of(k_ring, gl.maximum(k_n - 1, 0), half)
    row = (bg * tiles + a) * C + half * OWN
    _write(dk, [row, 0], staged, dk_KK)
    for r in range(R):
        place_K = (bg * R + r) * tiles * C + u_K
        if R > 1:
            column_K = gl.zeros([OWN], gl.float32, KEY)
        dv_KV, column_K, block_n = _inside(
            dv_KV, column_K, v_KV, block_ring, block_n, until_BHS, place_K, start_S, a, u_K,
            half, GATE, DOCUMENTS, FINE,
        )  # fmt: skip
        if GATE and R > 1:
            place_K += levels * plane
        if GATE:
            gl.store(columns_PBHS + place_K, column_K)
    tma.store_wait(0)
    G = H // R
    rows = [bg // G, a * C + half * OWN, bg % G * C]
    _write(dv, rows, staged.reshape([1, OWN, C]), dv_KV)
    tma.store_wait(0)


@gluon.jit
def _after(after_LBHS, place_K, GATE: gl.constexpr):
    """The gates behind each key, to the edge at which it meets the walk's queries."""
    after_K = 0.0
    if GATE:
        after_K = gl.load(after_LBHS + place_K)
    return after_K


@gluon.jit
def _walk(
    dk_KK, dv_KV, column_K, k_KK, v_KV, ring, n, after_K, by_turns, u_K, start_S, own_end, lo, hi,
    half: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """The query blocks lo .. hi, all behind the keys. The consumers ask for products by turns, so
    that those of one are not held up by the other's while it has nothing else to do."""
    queries, outputs, of_less, of_delta, full, empty = ring
    zeros_KQ = gl.zeros([OWN, OWN], gl.float32, PAIRS)
    sums_K8 = sums_of_threads(zeros_KQ)
    for t in range(lo, hi, OWN):
        slot = n % BLOCKS
        mbarrier.wait(full.index(slot), (n // BLOCKS) & 1)
        q_QK, do_QV = queries.index(slot), outputs.index(slot).reshape([OWN, C])
        mbarrier.wait(by_turns.index(half), n & 1)
        s_KQ = warpgroup_mma(k_KK, q_QK.permute((1, 0)), zeros_KQ, use_acc=False, is_async=True)
        dp_KQ = zeros_KQ - of_delta.index(slot).load(QUERY)[None, :]
        dp_KQ = warpgroup_mma(v_KV, do_QV.permute((1, 0)), dp_KQ, is_async=True)
        mbarrier.arrive(by_turns.index(1 - half))
        s_KQ = warpgroup_mma_wait(1, deps=[s_KQ]) * LOG2_E
        if GATE:
            s_KQ += after_K[:, None]
        s_KQ -= of_less.index(slot).load(QUERY)[None, :]
        if DOCUMENTS:  # noqa: SIM102 (one of the two is decided when it is compiled)
            if t + OWN > own_end:
                start_Q = gl.load(start_S + t + gl.arange(0, OWN, QUERY))
                s_KQ = gl.where(u_K[:, None] >= start_Q[None, :], s_KQ, float("-inf"))
        p_KQ = gl.exp2(s_KQ)
        left_KQ = gl.convert_layout(p_KQ.to(outputs.dtype), LEFT)
        dv_KV = warpgroup_mma(left_KQ, do_QV, dv_KV, is_async=True)
        dp_KQ = warpgroup_mma_wait(1, deps=[dp_KQ])
        ds_KQ = p_KQ * dp_KQ
        if GATE:
            sums_K8 += sums_of_threads(ds_KQ)
        left_KQ = gl.convert_layout(ds_KQ.to(queries.dtype), LEFT)
        dk_KK = warpgroup_mma(left_KQ, q_QK, dk_KK, is_async=True)
        dk_KK, dv_KV = warpgroup_mma_wait(0, deps=[dk_KK, dv_KV])
        mbarrier.arrive(empty.index(slot))
        n = n + 1
    if GATE:
        column_K += gl.convert_layout(gl.sum(sums_K8, 1), KEY)
    return dk_KK, dv_KV, column_K, n


@gluon.jit
def _inside(
    dv_KV, column_K, v_KV, ring, n, until_BHS, place_K, start_S, a, u_K,
    half: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr, FINE: gl.constexpr,
):  # fmt: skip
    """The queries of the keys' own tile. What ds is multiplied with there is none of this kernel's
    business, but a gate's gradient is."""
    logits, outputs, of_less, of_delta, full, empty = ring
    zeros_KQ = gl.zeros([OWN, OWN], gl.float32, PAIRS)
    if GATE:
        until_K = gl.load(until_BHS + place_K)
    for i in gl.static_range(2):
        slot = n % BLOCKS
        mbarrier.wait(full.index(slot), (n // BLOCKS) & 1)
        # The first block's queries do not see the second half's keys.
        if i >= half:
            t_Q = a * C + i * OWN + gl.arange(0, OWN, QUERY)
            do_QV = outputs.index(slot).reshape([OWN, C])
            if GATE:
                dp_KQ = zeros_KQ - of_delta.index(slot).load(QUERY)[None, :]
                dp_KQ = warpgroup_mma(v_KV, do_QV.permute((1, 0)), dp_KQ, is_async=True)
            s_KQ = logits.index(slot).slice(half * OWN, OWN, 1).permute((1, 0)).load(PAIRS)
            s_KQ = gl.cast(s_KQ, FINE, bitcast=True).to(gl.float32) * LOG2_E
            if GATE:
                s_KQ -= until_K[:, None]
            s_KQ -= of_less.index(slot).load(QUERY)[None, :]
            seen_KQ = u_K[:, None] <= t_Q[None, :]
            if DOCUMENTS:
                seen_KQ = seen_KQ & (u_K[:, None] >= gl.load(start_S + t_Q)[None, :])
            p_KQ = gl.exp2(gl.where(seen_KQ, s_KQ, float("-inf")))
            if GATE:
                dp_KQ = warpgroup_mma_wait(0, deps=[dp_KQ])
                column_K += gl.sum(p_KQ * dp_KQ, 1)
            left_KQ = gl.convert_layout(p_KQ.to(outputs.dtype), LEFT)
            dv_KV = warpgroup_mma(left_KQ, do_QV, dv_KV)
        mbarrier.arrive(empty.index(slot))
        n = n + 1
    return dv_KV, column_K, n


@gluon.jit
def _carried(dk_KK, map_KK):
    """dk P. The map is finer than bf16 and dk has a wider range: each row is brought to at most 1
    for the product."""
    top_K = gl.maximum(gl.max(gl.abs(dk_KK), 1), 1e-30)
    left_KK = gl.convert_layout((dk_KK * (1.0 / top_K)[:, None]).to(map_KK.dtype), LEFT)
    zeros_KK = gl.zeros([OWN, C], gl.float32, WIDE)
    return warpgroup_mma(left_KK, map_KK, zeros_KK, use_acc=False) * top_K[:, None]


@gluon.jit
def _write(target, place, staged, x_KE):
    """Begins to write rows, through shared memory."""
    staged.reshape([OWN, C]).store(x_KE.to(target.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(target, place, staged)
