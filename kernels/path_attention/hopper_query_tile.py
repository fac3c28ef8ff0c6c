"""A tile's own part of the gradient of queries on Hopper (hopper_query_backward.py): ds of its
keys, and the way of dq from the tile's left edge to the queries (triton_tile_gradients.py).

Rows of dq need rows of ds alone, so a consumer has all it needs; and what is not in memory, upper
right quarters of ds and dM and the lower left one of X^T, is left out in blocks of 64.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from mixtron.kernels.hopper_tools import SWIZZLED, accumulator, free, left_operand, take
from mixtron.kernels.path_attention.hopper_walks import OWN, PAIRS, WIDE, C, sums_of_threads
from mixtron.kernels.path_attention.triton_forward import LOG2_E

ROW = gl.constexpr(gl.SliceLayout(1, PAIRS))
COLUMN = gl.constexpr(gl.SliceLayout(0, PAIRS))


@gluon.jit
def inside_tile(
    do_QV, of_rows, a, of_head, half: gl.constexpr, shared, GATE: gl.constexpr, FINE: gl.constexpr
):
    """The keys of the queries' own tile: writes ds; returns its sums over rows by threads, with
    a gate."""
    rings, _, written, _, _ = shared
    k_ring, v_ring, afters, _, _, _ = rings
    _, _, dlogits, _, _, _ = written
    t_Q, less_Q, delta_Q, start_Q = of_rows
    logits = take(k_ring, half)
    sum_Q = sums_of_threads(gl.zeros([OWN, OWN], gl.float32, PAIRS))
    for i in gl.static_range(half + 1):
        u_B = a * C + i * OWN + gl.arange(0, OWN, COLUMN)
        v_BV = take(v_ring, i)
        dp_QB = gl.zeros([OWN, OWN], gl.float32, PAIRS)
        dp_QB = warpgroup_mma(do_QV, v_BV.permute((1, 0)), dp_QB, use_acc=False, is_async=True)
        s_QB = logits.slice(i * OWN, OWN, 1).load(PAIRS)
        s_QB = gl.cast(s_QB, FINE, bitcast=True).to(gl.float32) * LOG2_E
        if GATE:
            s_QB -= afters.index(i).load(COLUMN)[None, :]
        seen_QB = (u_B[None, :] <= t_Q[:, None]) & (u_B[None, :] >= start_Q[:, None])
        p_QB = gl.exp2(gl.where(seen_QB, s_QB, float("-inf")) - less_Q[:, None])
        dp_QB = warpgroup_mma_wait(0, deps=[dp_QB])
        free(v_ring, i)
        ds_QB = p_QB * (dp_QB - delta_Q[:, None])
        pairs_QB = _pairs(of_head + a * C, half, i)
        gl.store(dlogits + pairs_QB, ds_QB.to(dlogits.dtype.element_ty))
        if GATE:
            sum_Q += sums_of_threads(ds_QB)
    if half == 0:
        # These queries have no keys in the tile's second block.
        pass_by(v_ring, 1)
    for i in gl.static_range(2):
        pass_by(k_ring, i)
    return sum_Q


@gluon.jit
def pass_by(ring, n):
    """Frees an item, if need be without having looked at it: but not before it is there, which
    would free the one before it."""
    take(ring, n)
    free(ring, n)


@gluon.jit
def through_tile(dq_QK, of_rows, places, scale, a, n, map_n, half: gl.constexpr, shared):
    """Writes -dM, whose M is before beta, and dq, from that at the tile's left edge and from ds
    inside of it (triton_tile_gradients.py): as it is written there, of the columns up to the rows.
    """
    rings, read, written, _, sizes = shared
    k_ring, v_ring, _, map_ring, _, _ = rings
    _, _, _, beta = read
    _, _, dlogits, dM, dq, _ = written
    t_Q, _, _, start_Q = of_rows
    of_queries, of_keys, token_Q = places
    XT_CC = take(map_ring, map_n)
    FINE: gl.constexpr = XT_CC.dtype
    left_QK = dq_QK
    for i in gl.static_range(half + 1):
        Y_BK = take(v_ring, n + i)._reinterpret(FINE, [OWN, C], SWIZZLED)
        dM_QB = gl.zeros([OWN, OWN], gl.float32, PAIRS)
        dM_QB = finely(dM_QB, left_QK, Y_BK.permute((1, 0)))
        for j in gl.static_range(i + 1):
            XT_BB = XT_CC.slice(j * OWN, OWN, 0).slice(i * OWN, OWN, 1)
            ds_QB = gl.load(dlogits + _pairs(of_queries, half, j))
            dM_QB = finely(dM_QB, ds_QB.to(gl.float32), XT_BB)
        u_B = a * C + i * OWN + gl.arange(0, OWN, COLUMN)
        upto_QB = (u_B[None, :] <= t_Q[:, None]) & (u_B[None, :] >= start_Q[:, None])
        dM_QB = gl.where(upto_QB, dM_QB, 0.0)
        gl.store(dM + _pairs(of_queries, half, i), (dM_QB * scale).to(dM.dtype.element_ty))
        beta_B = gl.load(beta + of_keys + i * OWN + gl.arange(0, OWN, COLUMN))
        ds_QB = gl.convert_layout(ds_QB.to(k_ring[0].dtype), left_operand(C))
        dq_QK = warpgroup_mma(ds_QB, take(k_ring, n + i), dq_QK)
        w_BK = take(k_ring, n + 2) if i == 0 else take(v_ring, n + 2)
        w_BK = w_BK._reinterpret(FINE, [OWN, C], SWIZZLED)
        dq_QK = finely(dq_QK, dM_QB * -beta_B[None, :], w_BK)
    column_K = gl.arange(0, C, gl.SliceLayout(0, WIDE))
    inside_Q = gl.convert_layout(t_Q < sizes[0], gl.SliceLayout(1, WIDE))
    token_Q = gl.convert_layout(token_Q, gl.SliceLayout(1, WIDE))
    out = dq + token_Q[:, None] * C + column_K[None, :]
    gl.store(out, (dq_QK * scale).to(dq.dtype.element_ty), inside_Q[:, None])


@gluon.jit
def _pairs(first, half: gl.constexpr, i: gl.constexpr):
    """Where a consumer's rows and the i-th block's columns of a tile [C, C] lie."""
    row_Q = half * OWN + gl.arange(0, OWN, ROW)
    column_B = i * OWN + gl.arange(0, OWN, COLUMN)
    return first * C + row_Q[:, None] * C + column_B[None, :]


@gluon.jit
def finely(acc_QN, x_QK, y):
    """acc + x y, with x in y's dtype, fp16, which is finer than bf16 but has a smaller range: for
    the product each row is brought to about 1 by a power of 2."""
    N: gl.constexpr = y.shape[1]
    # Not of less than 2^-67, so that what it is added to stays in range.
    top_Q = gl.maximum(gl.cast(gl.max(gl.abs(x_QK), 1), gl.int32, bitcast=True), 60 << 23)
    top_Q = top_Q & (255 << 23)
    up_Q, down_Q = gl.cast(top_Q, gl.float32, bitcast=True), (254 << 23) - top_Q
    down_Q = gl.cast(down_Q, gl.float32, bitcast=True)
    left_QK = gl.convert_layout((x_QK * down_Q[:, None]).to(y.dtype), left_operand(N))
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(N))
    up_Q, down_Q = gl.convert_layout(up_Q, ROWS), gl.convert_layout(down_Q, ROWS)
    return warpgroup_mma(left_QK, y, acc_QN * down_Q[:, None]) * up_Q[:, None]
