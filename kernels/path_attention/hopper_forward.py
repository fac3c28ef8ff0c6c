"""Attention's forward with Householder maps on Hopper: triton_forward.py's walk, by three groups of
warps.

A producer loads what the walk reads, in its order and ahead of it, also across the tree's levels
and from one tile of queries to the next. Two consumers own 64 of the tile's 128 queries each. A
consumer asks for a block's logits and adds the values of the block before at the same time, and
makes the weights of the one while the tensor cores still sum up the other, or work for the other
consumer.

In shared memory: queries' versions 2 x 32, blocks of keys 2 x 32 (the tile's own logits come as the
first), of values 2 x 32 KiB.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

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
    free,
    item,
    left_operand,
    ring,
    take,
    turns,
)
from mixtron.kernels.path_attention.hopper_walks import OWN, C, taken
from mixtron.kernels.path_attention.triton_forward import LN_2, LOG2_E
from mixtron.kernels.path_attention.triton_tree import (
    first_tile,
    key_version,
    query_version,
    versions_at,
)

VARYING = ("T", "tiles", "levels", "reach", "versions", "heads", "H", "work")


@gluon.jit(do_not_specialize=VARYING)
def hopper_forward_kernel(
    q, k, v, logits, gates, totals, start_S, o_BTHV, lse_BHS,
    T, tiles, levels, reach, versions, plane, heads, H, work,
    R: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr, FINE: gl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of all heads, tile by tile of 128 queries.

    q, k, v and logits are descriptors of [128, 128] boxes of [B H versions C, K],
    [B G versions C, K], [B, T, G V] and [B H S, C], the last one's FINE entries as v's dtype. Of
    the `work` tiles of all heads each program takes some; `plane` is a multiple of 16. The rest as
    in triton_forward.py.
    """
    rings = ring(q, 2, 2), ring(k, 2, 2), ring(v, 2, 2)
    fence_async_shared()
    sizes, tree = (tiles, H, work), (levels, reach, versions)
    outputs = o_BTHV, lse_BHS, T, heads
    consumed = rings, sizes, (gates, totals, start_S, plane), outputs
    gl.warp_specialize(
        [
            (_consume, (consumed, 0, GATE, DOCUMENTS, FINE)),
            (_consume, (consumed, 1, GATE, DOCUMENTS, FINE)),
            (_produce, (rings, sizes, (q, k, v, logits, start_S), tree, R, DOCUMENTS)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(rings, sizes, operands, tree, R: gl.constexpr, DOCUMENTS: gl.constexpr):
    q_ring, k_ring, v_ring = rings
    tiles, H, work = sizes
    q, k, v, logits, start_S = operands
    levels, reach, versions = tree
    q_n, k_n, v_n = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for n in range(turns(work)):
        a, bh = taken(n, tiles, work // tiles)
        b, h = bh // H, bh % H
        g, G = h // R, H // R
        fill(k_ring, k_n, logits, [(bh * tiles + a) * C, 0])
        k_n += 1
        # Values are asked for one block later than keys: their products are.
        c_v = a
        first_a = first_tile(start_S, a, C, DOCUMENTS)
        own = 0 * a
        for level in range(levels):
            edge = (a >> level) << level
            if ((a >> level) % 2 == 1) & (first_a < edge):
                version = own + query_version(a, level, reach)
                fill(q_ring, q_n, q, [(bh * versions + version) * C, 0])
                q_n += 1
                row_0 = (
                    (b * G + g) * versions + own + key_version(edge - 1, level, reach) - (edge - 1)
                )
                for i in range(edge - gl.maximum(edge - (1 << level), first_a)):
                    c = edge - 1 - i
                    fill(k_ring, k_n, k, [(row_0 + c) * C, 0])
                    fill(v_ring, v_n, v, [b, c_v * C, g * C])
                    k_n += 1
                    v_n += 1
                    c_v = c
            own += versions_at(level, tiles, reach)
        fill(v_ring, v_n, v, [b, c_v * C, g * C])
        v_n += 1


@gluon.jit
def _consume(
    consumed, half: gl.constexpr, GATE: gl.constexpr, DOCUMENTS: gl.constexpr, FINE: gl.constexpr
):
    """The queries half * OWN .. of each tile."""
    rings, sizes, of_tokens, outputs = consumed
    q_ring, k_ring, v_ring = rings
    tiles, H, work = sizes
    gates, totals, start_S, plane = of_tokens
    LAYOUT: gl.constexpr = accumulator(C)
    WEIGHTS: gl.constexpr = left_operand(C)
    row_Q = half * OWN + gl.arange(0, OWN, gl.SliceLayout(1, LAYOUT))
    column_C = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))
    q_n, k_n, v_n = gl.to_tensor(-1), gl.to_tensor(0), gl.to_tensor(0)
    for n in range(turns(work)):
        a, bh = taken(n, tiles, work // tiles)
        t_Q = a * C + row_Q
        start_Q = 0 * t_Q
        if DOCUMENTS:
            start_Q = gl.load(start_S + t_Q)
            latest = gl.load(start_S + a * C + (half * OWN + OWN - 1))
        of_head = bh.to(gl.int64) * tiles * C
        # The tile's own tokens. A query sees itself: no row is empty.
        u_C = a * C + column_C
        seen_QC = (u_C[None, :] <= t_Q[:, None]) & (u_C[None, :] >= start_Q[:, None])
        logits = take(k_ring, k_n).slice(half * OWN, OWN)
        s_QC = gl.cast(logits.load(LAYOUT), FINE, bitcast=True).to(gl.float32) * LOG2_E
        free(k_ring, k_n)
        k_n += 1
        if GATE:
            s_QC -= gl.load(gates + (of_head + u_C))[None, :]
        s_QC = gl.where(seen_QC, s_QC, float("-inf"))
        top_Q = gl.full([OWN], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
        sum_Q = gl.zeros([OWN], gl.float32, gl.SliceLayout(1, LAYOUT))
        p_QC, shrink_Q, top_Q, sum_Q = _weigh(s_QC, top_Q, sum_Q, 1.0)
        p_QC = gl.convert_layout(p_QC.to(k_ring[0].dtype), WEIGHTS)
        acc_QV = gl.zeros([OWN, C], gl.float32, LAYOUT)
        v_CV = take(v_ring, v_n).reshape([C, C])
        # Of the gates from a block's right edge to the tile's left edge.
        between = gl.to_tensor(0.0)
        blocks = a - first_tile(start_S, a, C, DOCUMENTS)
        for i in range(blocks):
            c = a - 1 - i
            if GATE:
                after_C = gl.load(gates + (plane + of_head + c * C + column_C)) + between
                total = totals + of_head // OWN + c * (C // OWN)
                between += gl.load(total) + gl.load(total + 1)
            # Where it is in another node than the block before, there is another version.
            if (c ^ (c + 1)) > ((a ^ c) & (a ^ (c + 1))):
                free(q_ring, q_n, i > 0)
                q_n += 1
                take(q_ring, q_n)
            q_QK = item(q_ring, q_n).slice(half * OWN, OWN)
            k_KC = take(k_ring, k_n).permute((1, 0))
            s_QC = gl.zeros([OWN, C], gl.float32, LAYOUT)
            s_QC = warpgroup_mma(q_QK, k_KC, s_QC, use_acc=False, is_async=True)
            acc_QV = warpgroup_mma(p_QC, v_CV, acc_QV, is_async=True)
            s_QC = warpgroup_mma_wait(1, deps=[s_QC])
            free(k_ring, k_n)
            k_n += 1
            if GATE:
                s_QC = s_QC * LOG2_E + after_C[None, :]
            if DOCUMENTS:  # noqa: SIM102 (one of the two is decided when it is compiled)
                if c * C < latest:
                    seen_QC = (c * C + column_C)[None, :] >= start_Q[:, None]
                    s_QC = gl.where(seen_QC, s_QC, float("-inf"))
            SCALE: gl.constexpr = 1.0 if GATE else LOG2_E
            p_QC, shrink_Q, top_Q, sum_Q = _weigh(s_QC, top_Q, sum_Q, SCALE)
            p_QC = gl.convert_layout(p_QC.to(k_ring[0].dtype), WEIGHTS)
            # Waits here, not where it is needed: ptxas moves the wait for a product in front of
            # all that it can, but not of a branch, and the weights are made meanwhile.
            v_CV = take(v_ring, v_n + 1).reshape([C, C])
            acc_QV = warpgroup_mma_wait(0, deps=[acc_QV]) * shrink_Q[:, None]
            free(v_ring, v_n)
            v_n += 1
        free(q_ring, q_n, blocks > 0)
        acc_QV = warpgroup_mma(p_QC, v_CV, acc_QV, is_async=True)
        acc_QV = warpgroup_mma_wait(0, deps=[acc_QV])
        free(v_ring, v_n)
        v_n += 1
        if GATE:
            # The gates from its tile's left edge to a query are in all of its logits: added once.
            top_Q += gl.load(gates + (of_head + t_Q))
        lse_Q = top_Q * LN_2 + gl.log(sum_Q)
        _put(outputs, of_head + t_Q, bh // H, bh % H, t_Q, acc_QV * (1.0 / sum_Q)[:, None], lse_Q)


@gluon.jit
def _weigh(s_QC, top_Q, sum_Q, SCALE: gl.constexpr):
    """The softmax's weights of a block, how much those before shrink, and its running state."""
    new_Q = gl.maximum(top_Q, gl.max(s_QC, 1) * SCALE)
    p_QC = gl.exp2(s_QC * SCALE - new_Q[:, None])
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
