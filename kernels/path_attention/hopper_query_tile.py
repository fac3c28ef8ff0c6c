"""A tile's own part of the gradient of queries on Hopper (hopper_query_backward.py): ds of its
keys, and the way of dq from the tile's left edge to the queries (triton_tile_gradients.py).

Rows of dq need rows of ds alone, so a consumer has all it needs; and what is not in memory, upper
right quarters of ds and dM and the lower left one of X^T, is left out in blocks of 64.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from mixtron.kernels.hopper_tools import (
    SWIZZLED,
    accumulator,
    add,
    begin_square,
    free,
    left_operand,
    take,
)
from mixtron.kernels.path_attention.hopper_walks import OWN, PAIRS, WIDE, C, sums_of_threads
from mixtron.kernels.path_attention.triton_forward import LOG2_E

ROW = gl.constexpr(gl.SliceLayout(1, PAIRS))
COLUMN = gl.constexpr(gl.SliceLayout(0, PAIRS))
WIDE_ROW = gl.constexpr(gl.SliceLayout(1, WIDE))


@gluon.jit
def inside_tile(
    do_QV, of_rows, a, of_head, half: gl.constexpr, shared, GATE: gl.constexpr, FINE: gl.constexpr
):
    """The keys of the queries' own tile: writes ds; returns its sums over rows by threads, with
    a gate."""
    rings, _, written, _, _ = shared
    k_ring, v_ring, of_columns, _, _, _ = rings
    _, _, dlogits, _, _, _ = written
    t_Q, less_Q, delta_Q, start_Q = of_rows
    logits = take(k_ring, half)
    dp_0 = begin_square(do_QV, take(v_ring, 0).permute((1, 0)))
    dp_1 = dp_0
    if half == 1:
        dp_1 = begin_square(do_QV, take(v_ring, 1).permute((1, 0)))
    products = dp_0, dp_1
    sum_Q = sums_of_threads(gl.zeros([OWN, OWN], gl.float32, PAIRS))
    for i in gl.static_range(half + 1):
        s_QB = logits.slice(i * OWN, OWN, 1).load(PAIRS)
        s_QB = gl.cast(s_QB, FINE, bitcast=True).to(gl.float32) * LOG2_E
        if GATE:
            s_QB -= of_columns.index(i).load(COLUMN)[None, :]
        upto_QB = _upto(a, i, t_Q, start_Q)
        p_QB = gl.exp2(gl.where(upto_QB, s_QB, float("-inf")) - less_Q[:, None])
        dp_QB = warpgroup_mma_wait(half - i, deps=[products[i]])
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
    rings, _, written, _, sizes = shared
    k_ring, v_ring, of_columns, map_ring, _, _ = rings
    _, _, dlogits, dM, dq, _ = written
    t_Q, _, _, start_Q = of_rows
    of_queries, token_Q = places
    XT_CC = take(map_ring, map_n)
    FINE: gl.constexpr = XT_CC.dtype
    SLOTS: gl.constexpr = of_columns.shape[0]
    ds_0 = gl.load(dlogits + _pairs(of_queries, half, 0))
    ds_1 = ds_0
    if half == 1:
        ds_1 = gl.load(dlogits + _pairs(of_queries, half, 1))

    down_Q, up_Q = scales(gl.abs(dq_QK))
    left_QK = _left(dq_QK * down_Q[:, None], FINE, OWN)
    dM_0 = begin_square(left_QK, _fine(take(v_ring, n), FINE).permute((1, 0)))
    dM_1 = dM_0
    if half == 1:
        dM_1 = begin_square(left_QK, _fine(take(v_ring, n + 1), FINE).permute((1, 0)))
    k_BK = take(k_ring, n)
    dq_QK = add(_left(ds_0, k_BK.dtype, C), k_BK, dq_QK)
    if half == 1:
        dq_QK = add(_left(ds_1, k_BK.dtype, C), take(k_ring, n + 1), dq_QK)

    # Not before these are done, or there are too few registers.
    if half == 0:
        dM_0 = warpgroup_mma_wait(1, deps=[dM_0])
    else:
        dM_0, dM_1 = warpgroup_mma_wait(2, deps=[dM_0, dM_1])
    # Rows are brought to one range in both blocks, so that their products add up.
    ds_0, ds_1 = ds_0.to(gl.float32), ds_1.to(gl.float32)
    ds_down_Q, ds_up_Q = scales(gl.maximum(gl.abs(ds_0), gl.abs(ds_1)))
    ds_0 = _left(ds_0 * ds_down_Q[:, None], FINE, OWN)
    ds_1 = _left(ds_1 * ds_down_Q[:, None], FINE, OWN)
    from_Q = gl.convert_layout(up_Q, ROW) * ds_down_Q
    dM_0 = dM_0 * from_Q[:, None]
    dM_0 = add(ds_0, XT_CC.slice(0, OWN, 0).slice(0, OWN, 1), dM_0)
    if half == 0:
        dM_0, dq_QK = warpgroup_mma_wait(0, deps=[dM_0, dq_QK])
        dM_1 = dM_0
    else:
        dM_1 = dM_1 * from_Q[:, None]
        dM_1 = add(ds_0, XT_CC.slice(0, OWN, 0).slice(OWN, OWN, 1), dM_1)
        dM_1 = add(ds_1, XT_CC.slice(OWN, OWN, 0).slice(OWN, OWN, 1), dM_1)
        dM_0, dM_1, dq_QK = warpgroup_mma_wait(0, deps=[dM_0, dM_1, dq_QK])

    upto_QB = _upto(a, 0, t_Q, start_Q)
    dM_0 = gl.where(upto_QB, dM_0 * ds_up_Q[:, None], 0.0)
    gl.store(dM + _pairs(of_queries, half, 0), (dM_0 * scale).to(dM.dtype.element_ty))
    dM_0 = dM_0 * -of_columns.index(n % SLOTS).load(COLUMN)[None, :]
    if half == 0:
        dM_1 = dM_0
    else:
        upto_QB = _upto(a, 1, t_Q, start_Q)
        dM_1 = gl.where(upto_QB, dM_1 * ds_up_Q[:, None], 0.0)
        gl.store(dM + _pairs(of_queries, half, 1), (dM_1 * scale).to(dM.dtype.element_ty))
        dM_1 = dM_1 * -of_columns.index((n + 1) % SLOTS).load(COLUMN)[None, :]
    down_Q, up_Q = scales(gl.maximum(gl.abs(dM_0), gl.abs(dM_1)))
    dq_QK = dq_QK * gl.convert_layout(down_Q, WIDE_ROW)[:, None]
    w_BK = _fine(take(k_ring, n + 2), FINE)
    dq_QK = add(_left(dM_0 * down_Q[:, None], FINE, C), w_BK, dq_QK)
    if half == 1:
        w_BK = _fine(take(v_ring, n + 2), FINE)
        dq_QK = add(_left(dM_1 * down_Q[:, None], FINE, C), w_BK, dq_QK)
    dq_QK = warpgroup_mma_wait(0, deps=[dq_QK]) * gl.convert_layout(up_Q, WIDE_ROW)[:, None]
    column_K = gl.arange(0, C, gl.SliceLayout(0, WIDE))
    inside_Q = gl.convert_layout(t_Q < sizes[0], WIDE_ROW)
    token_Q = gl.convert_layout(token_Q, WIDE_ROW)
    out = dq + token_Q[:, None] * C + column_K[None, :]
    gl.store(out, (dq_QK * scale).to(dq.dtype.element_ty), inside_Q[:, None])


@gluon.jit
def _pairs(first, half: gl.constexpr, i: gl.constexpr):
    """Where a consumer's rows and the i-th block's columns of a tile [C, C] lie."""
    row_Q = half * OWN + gl.arange(0, OWN, ROW)
    column_B = i * OWN + gl.arange(0, OWN, COLUMN)
    return first * C + row_Q[:, None] * C + column_B[None, :]


@gluon.jit
def _upto(a, i: gl.constexpr, t_Q, start_Q):
    """Of a tile's i-th block of keys: those up to each query, of its document."""
    u_B = a * C + i * OWN + gl.arange(0, OWN, COLUMN)
    return (u_B[None, :] <= t_Q[:, None]) & (u_B[None, :] >= start_Q[:, None])


@gluon.jit
def _fine(rows, FINE: gl.constexpr):
    """A ring's item as what its entries are."""
    return rows._reinterpret(FINE, [OWN, C], SWIZZLED)


@gluon.jit
def _left(x, dtype: gl.constexpr, N: gl.constexpr):
    """As the left operand of a product with N columns."""
    return gl.convert_layout(x.to(dtype), left_operand(N))


@gluon.jit
def scales(x_QK):
    """For rows of no entry below 0, powers of 2: what brings them to about 1, so that fp16, which
    is finer than bf16 but has a smaller range, holds them, and back."""
    # Not of less than 2^-67, so that what they are added to stays in range.
    top_Q = gl.maximum(gl.cast(gl.max(x_QK, 1), gl.int32, bitcast=True), 60 << 23)
    top_Q = top_Q & (255 << 23)
    up_Q, down_Q = gl.cast(top_Q, gl.float32, bitcast=True), (254 << 23) - top_Q
    return gl.cast(down_Q, gl.float32, bitcast=True), up_Q


@gluon.jit
def finely(acc_QN, x_QK, y):
    """acc + x y, with x in y's dtype, fp16."""
    N: gl.constexpr = y.shape[1]
    down_Q, up_Q = scales(gl.abs(x_QK))
    left_QK = _left(x_QK * down_Q[:, None], y.dtype, N)
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(N))
    up_Q, down_Q = gl.convert_layout(up_Q, ROWS), gl.convert_layout(down_Q, ROWS)
    return warpgroup_mma(left_QK, y, acc_QN * down_Q[:, None]) * up_Q[:, None]
