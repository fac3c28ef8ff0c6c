"""Attention's forward with Householder maps on Hopper: triton_forward.py's walk, by three groups of
warps.

A producer loads what the walk reads, in its order and ahead of it, also across the tree's levels.
Two consumers own 64 of the tile's 128 queries each. A consumer asks for a block's logits and adds
the values of the block before at the same time, and makes the weights of the one while the tensor
cores still sum up the other, or work for the other consumer.

In shared memory, in KiB: queries' versions 2 x 32, blocks of keys 2 x 32 (the tile's own logits
come as the first), of values 2 x 32; with a gate its sums (triton_gates.py) come along.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mixtron.kernels.hopper_tools import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    accumulator,
    fill,
    fill_with,
    free,
    item,
    left_operand,
    ring,
    take,
)
from mixtron.kernels.path_attention.hopper_walks import OWN, C, taken
from mixtron.kernels.path_attention.triton_forward import LN_2, LOG2_E
from mixtron.kernels.path_attention.triton_tree import (
    first_tile,
    key_version,
    query_version,
    versions_at,
)

VARYING = ("T", "tiles", "levels", "reach", "versions", "plane", "heads", "H")


@gluon.jit(do_not_specialize=VARYING)
def hopper_forward_kernel(
    q, k, v, logits, less, after, start_S, o_BTHV, lse_BHS,
    T, tiles, levels, reach, versions, plane, heads, H,
    R: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr, FINE: gl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of a tile of 128 queries.

    q, k, v and logits are descriptors of [128, 128] boxes of [B H versions C, K],
    [B G versions C, K], [B, T, G V] and [B H S, C], the last one's FINE entries as v's dtype; with
    a gate less and after of [128] of levels' planes [B H S]. The rest as in triton_forward.py.
    """
    q_ring, k_ring, v_ring = ring(q, 2, 2), ring(k, 2, 2), ring(v, 2, 2)
    lesses, afters = k_ring[0], k_ring[0]
    if GATE:
        lesses = gl.allocate_shared_memory(less.dtype, [2, C], less.layout)
        afters = gl.allocate_shared_memory(after.dtype, [2, C], after.layout)
    fence_async_shared()
    rings, sizes = (q_ring, k_ring, v_ring, lesses, afters), (tiles, H)
    operands, tree = (q, k, v, logits, less, after, start_S), (levels, reach, versions, plane)
    outputs = o_BTHV, lse_BHS, T, heads
    consumed = rings, sizes, start_S, outputs
    gl.warp_specialize(
        [
            (_consume, (consumed, 0, GATE, DOCUMENTS, FINE)),
            (_consume, (consumed, 1, GATE, DOCUMENTS, FINE)),
            (_produce, (rings, sizes, operands, tree, R, GATE, DOCUMENTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    rings, sizes, operands, tree, R: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr
):
    q_ring, k_ring, v_ring, lesses, afters = rings
    tiles, H = sizes
    q, k, v, logits, less, after, start_S = operands
    levels, reach, versions, plane = tree
    turn, bh = taken()
    a, b = tiles - 1 - turn, bh // H
    g, G = bh % H // R, H // R
    head = bh * tiles * C
    if GATE:
        # In place of a block's sums, what the tile's own keys lie before.
        fill_with(k_ring, 0, logits, [head + a * C, 0], afters, less, [head + a * C])
    else:
        fill(k_ring, 0, logits, [head + a * C, 0])
    q_n, block = gl.to_tensor(0), gl.to_tensor(0)
    # Values are asked for one block later than keys: their products are.
    c_v = a
    first_a = first_tile(start_S, a, C, DOCUMENTS)
    own = 0 * a
    for level in range(levels):
        edge = (a >> level) << level
        if ((a >> level) % 2 == 1) & (first_a < edge):
            version = own + query_version(a, level, reach)
            row = [(bh * versions + version) * C, 0]
            if GATE:
                fill_with(q_ring, q_n, q, row, lesses, less, [level * plane + head + a * C])
            else:
                fill(q_ring, q_n, q, row)
            q_n += 1
            row_0 = (b * G + g) * versions + own + key_version(edge - 1, level, reach) - (edge - 1)
            for i in range(edge - gl.maximum(edge - (1 << level), first_a)):
                c = edge - 1 - i
                key = [(row_0 + c) * C, 0]
                if GATE:
                    place = [level * plane + head + c * C]
                    fill_with(k_ring, block + 1, k, key, afters, after, place)
                else:
                    fill(k_ring, block + 1, k, key)
                fill(v_ring, block, v, [b, c_v * C, g * C])
                block += 1
                c_v = c
        own += versions_at(level, tiles, reach)
    fill(v_ring, block, v, [b, c_v * C, g * C])


@gluon.jit
def _consume(
    consumed, half: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr, FINE: gl.constexpr
):
    """The tile's queries half * OWN .. ."""
    rings, sizes, start_S, outputs = consumed
    q_ring, k_ring, v_ring, lesses, afters = rings
    tiles, H = sizes
    LAYOUT: gl.constexpr = accumulator(C)
    WEIGHTS: gl.constexpr = left_operand(C)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    column_C = gl.arange(0, C, COLUMN)
    turn, bh = taken()
    a = tiles - 1 - turn
    t_Q = a * C + half * OWN + gl.arange(0, OWN, ROW)
    start_Q = 0 * t_Q
    of_head = bh.to(gl.int64) * tiles * C
    u_C = a * C + column_C
    if DOCUMENTS:
        start_Q = gl.load(start_S + t_Q)
        latest = gl.load(start_S + a * C + (half * OWN + OWN - 1))
    # The tile's own tokens. A query sees itself: no row is empty.
    seen_QC = (u_C[None, :] <= t_Q[:, None]) & (u_C[None, :] >= start_Q[:, None])
    logits = take(k_ring, 0).slice(half * OWN, OWN)
    s_QC = gl.cast(logits.load(LAYOUT), FINE, bitcast=True).to(gl.float32) * LOG2_E
    top_Q = gl.full([OWN], float("-inf"), gl.float32, ROW)
    sum_Q = gl.zeros([OWN], gl.float32, ROW)
    less_Q = sum_Q
    if GATE:
        s_QC += afters.index(0).load(COLUMN)[None, :]
        less_Q = afters.index(0).slice(half * OWN, OWN).load(ROW)
    free(k_ring, 0)
    s_QC = gl.where(seen_QC, s_QC, float("-inf"))
    p_QC, shrink_Q, top_Q, sum_Q = _weigh(s_QC, less_Q, top_Q, sum_Q, 1.0, GATE)
    p_QC = gl.convert_layout(p_QC.to(k_ring[0].dtype), WEIGHTS)
    acc_QV = gl.zeros([OWN, C], gl.float32, LAYOUT)
    v_CV = take(v_ring, 0).reshape([C, C])
    q_n = gl.to_tensor(-1)
    blocks = a - first_tile(start_S, a, C, DOCUMENTS)
    for i in range(blocks):
        c = a - 1 - i
        # Where it is in another node than the block before, there is another version.
        if (c ^ (c + 1)) > ((a ^ c) & (a ^ (c + 1))):
            free(q_ring, q_n, i > 0)
            q_n += 1
            take(q_ring, q_n)
            if GATE:
                less_Q = lesses.index(q_n % 2).slice(half * OWN, OWN).load(ROW)
        q_QK = item(q_ring, q_n).slice(half * OWN, OWN)
        k_KC = take(k_ring, i + 1).permute((1, 0))
        s_QC = gl.zeros([OWN, C], gl.float32, LAYOUT)
        s_QC = warpgroup_mma(q_QK, k_KC, s_QC, use_acc=False, is_async=True)
        acc_QV = warpgroup_mma(p_QC, v_CV, acc_QV, is_async=True)
        s_QC = warpgroup_mma_wait(1, deps=[s_QC])
        if GATE:
            s_QC = s_QC * LOG2_E + afters.index((i + 1) % 2).load(COLUMN)[None, :]
        free(k_ring, i + 1)
        if DOCUMENTS:  # noqa: SIM102 (one of the two is decided when it is compiled)
            if c * C < latest:
                seen_QC = (c * C + column_C)[None, :] >= start_Q[:, None]
                s_QC = gl.where(seen_QC, s_QC, float("-inf"))
        SCALE: gl.constexpr = 1.0 if GATE else LOG2_E
        p_QC, shrink_Q, top_Q, sum_Q = _weigh(s_QC, less_Q, top_Q, sum_Q, SCALE, GATE)
        p_QC = gl.convert_layout(p_QC.to(k_ring[0].dtype), WEIGHTS)
        # Waits here, not where it is needed: ptxas moves the wait for a product in front of
        # all that it can, but not of a branch, and the weights are made meanwhile.
        v_CV = take(v_ring, i + 1).reshape([C, C])
        acc_QV = warpgroup_mma_wait(0, deps=[acc_QV]) * shrink_Q[:, None]
        free(v_ring, i)
    acc_QV = warpgroup_mma(p_QC, v_CV, acc_QV, is_async=True)
    acc_QV = warpgroup_mma_wait(0, deps=[acc_QV])
    lse_Q = top_Q * LN_2 + gl.log(sum_Q)
    _put(outputs, of_head + t_Q, bh // H, bh % H, t_Q, acc_QV * (1.0 / sum_Q)[:, None], lse_Q)


@gluon.jit
def _weigh(s_QC, less_Q, top_Q, sum_Q, SCALE: gl.constexpr, GATE: gl.constexpr):
    """The softmax's weights of a block, with what is taken from all of a row's logits; how much
    those before shrink, and its running state."""
    new_Q = gl.max(s_QC, 1) * SCALE
    if GATE:
        new_Q = new_Q - less_Q
    new_Q = gl.maximum(top_Q, new_Q)
    base_Q = new_Q
    if GATE:
        base_Q = new_Q + less_Q
    p_QC = gl.exp2(s_QC * SCALE - base_Q[:, None])
    shrink_Q = gl.exp2(top_Q - new_Q)
    return p_QC, shrink_Q, new_Q, sum_Q * shrink_Q + gl.sum(p_QC, 1)


@gluon.jit
def _put(outputs, place_Q, b, h, t_Q, o_QV, lse_Q):
    o_BTHV, lse_BHS, T, heads = outputs
    column_V = gl.arange(0, C, gl.SliceLayout(0, accumulator(C)))
    row_Q = (b.to(gl.int64) * T + t_Q) * heads + h
    o = o_BTHV + (row_Q[:, None] * C + column_V[None, :])
    gl.store(o, o_QV.to(o_BTHV.dtype.element_ty), (t_Q < T)[:, None])
    gl.store(lse_BHS + place_Q, lse_Q)
