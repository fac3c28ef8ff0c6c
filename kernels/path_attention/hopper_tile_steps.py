"""The steps of hopper_tile_gradients.py, each for the rows of half a tile."""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)

from mixtron.kernels.hopper_tools import accumulator, add, begin_square, begin_wide
from mixtron.kernels.path_attention.hopper_tile_places import (
    DA_WRITTEN,
    DK_DQ,
    DL_DP_K,
    DL_READ,
    DQ_READ,
    DX_WRITTEN,
    DY_WRITTEN,
    L_V,
    Q_Y,
    XT_DA,
    XT_ROUNDED,
    Y_ROUNDED,
    ZT_WRITTEN,
    block_at,
    come,
    half_at,
    hear,
    leave,
    own_M,
    square_at,
    tell,
)
from mixtron.kernels.path_attention.hopper_tiles import (
    BLOCK,
    COLUMN,
    LEFT,
    ROW,
    left,
    transposed,
)

WIDE = gl.constexpr(accumulator(128))
"""Of [BLOCK, C] in registers."""
ROW_WIDE = gl.constexpr(gl.SliceLayout(1, WIDE))
VECTORS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def begin_M(
    shared, odd, documents, scale,
    half: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """1. Writes the own block of M^T before beta. Returns the first half's far one."""
    come(shared, odd, odd)
    w_own = half_at(shared, odd, half)
    _round(w_own, FINE)
    tell(shared, half)
    come(shared, Q_Y, 0)
    M_own = begin_square(w_own, transposed(half_at(shared, Q_Y, half)))
    M_far = M_own
    if half == 0:
        M_far = begin_square(w_own, transposed(half_at(shared, Q_Y, 1)))
    M_own, M_far = warpgroup_mma_wait(0, deps=[M_own, M_far])
    M_own = _of_later(M_own * scale, documents, shared[1], half, half, DOCUMENTS)
    _put(own_M(shared, half), M_own)
    fence_async_shared()
    if half == 0:
        M_far = _of_later(M_far * scale, documents, shared[1], 0, 1, DOCUMENTS)
    return left(M_far, w_own.dtype)


@gluon.jit
def pass_X(shared, odd, MT_far, beta_B, half: gl.constexpr):
    """2. Writes -diag(beta) dX in place of dlogits; its far block, where dlogits are still read, to
    the fourth block there. Returns dlogits^T Q."""
    come(shared, DL_DP_K, odd)
    come(shared, DK_DQ, 0)
    w_own, q_own = half_at(shared, odd, half), half_at(shared, Q_Y, half)
    MT_own = own_M(shared, half)
    d_own, d_far = block_at(shared, DL_DP_K, 2 * half), block_at(shared, DL_DP_K, 1)
    dX_own = begin_square(MT_own, d_own)
    if half == 0:
        dX_own = add(MT_far, d_far, dX_own)
    dX_own = add(w_own, transposed(half_at(shared, DK_DQ, half)), dX_own)
    dk_BK = begin_wide(transposed(d_own), q_own)
    dX_far = dX_own
    if half == 0:
        dk_BK = add(transposed(d_far), half_at(shared, Q_Y, 1), dk_BK)
        dX_own, dk_BK = warpgroup_mma_wait(0, deps=[dX_own, dk_BK])
        tell(shared, DL_READ)
    else:
        dX_far = begin_square(MT_own, d_far)
        dX_far = add(w_own, transposed(half_at(shared, DK_DQ, 0)), dX_far)
        dX_own, dX_far, dk_BK = warpgroup_mma_wait(0, deps=[dX_own, dX_far, dk_BK])
        _put(block_at(shared, DL_DP_K, 3), dX_far * -beta_B[:, None])
    _put(d_own, dX_own * -beta_B[:, None])
    fence_async_shared()
    if half == 1:
        tell(shared, DX_WRITTEN)
    return dk_BK


@gluon.jit
def begin_U(shared, odd, half: gl.constexpr, FINE: gl.constexpr):
    """3. What comes through queries. Also rounds L, while there is room in registers."""
    come(shared, L_V, odd)
    _round(block_at(shared, L_V, 2 * half), FINE)
    if half == 0:
        _round(block_at(shared, L_V, 1), FINE)
    place = 1 - odd
    come(shared, place, odd)
    dU_BK = begin_wide(transposed(block_at(shared, place, 2 * half)), half_at(shared, Q_Y, half))
    if half == 0:
        dU_BK = add(transposed(block_at(shared, place, 1)), half_at(shared, Q_Y, 1), dU_BK)
    dU_BK = warpgroup_mma_wait(0, deps=[dU_BK])
    leave(shared, Q_Y)
    leave(shared, place)
    return dU_BK


@gluon.jit
def pass_Z(shared, odd, documents, half: gl.constexpr, DOCUMENTS: gl.constexpr):
    """4. Writes Z^T in place of dX and dlogits. Returns blocks as left operands."""
    L_own, L_far = block_at(shared, L_V, 2 * half), block_at(shared, L_V, 1)
    d_own, dX_far = block_at(shared, DL_DP_K, 2 * half), block_at(shared, DL_DP_K, 3)
    Z_own = begin_square(transposed(L_own), d_own)
    if half == 0:
        hear(shared, DX_WRITTEN, odd)
        Z_own = add(transposed(L_far), dX_far, Z_own)
    Z_own = warpgroup_mma_wait(0, deps=[Z_own])
    Z_own = _of_earlier(Z_own, documents, shared[1], half, half, DOCUMENTS).to(d_own.dtype)
    d_own.store(Z_own)
    Z_own = gl.convert_layout(Z_own, LEFT)
    Z_far = Z_own
    if half == 1:
        Z_far = warpgroup_mma_wait(0, deps=[begin_square(transposed(L_own), dX_far)])
        Z_far = _of_earlier(Z_far, documents, shared[1], 1, 0, DOCUMENTS).to(d_own.dtype)
        hear(shared, DL_READ, odd)
        block_at(shared, DL_DP_K, 1).store(Z_far)
        Z_far = gl.convert_layout(Z_far, LEFT)
    fence_async_shared()
    if half == 1:
        tell(shared, ZT_WRITTEN)
    return Z_own, Z_far


@gluon.jit
def add_Z(shared, odd, dk_BK, half: gl.constexpr):
    """4. Adds Z W and dk_right."""
    w_own = half_at(shared, odd, half)
    dk_BK = add(transposed(block_at(shared, DL_DP_K, 2 * half)), w_own, dk_BK)
    if half == 0:
        hear(shared, 1, odd)
        hear(shared, ZT_WRITTEN, odd)
        dk_BK = add(transposed(block_at(shared, DL_DP_K, 1)), half_at(shared, odd, 1), dk_BK)
    dk_BK = warpgroup_mma_wait(0, deps=[dk_BK])
    leave(shared, DL_DP_K)
    return dk_BK + half_at(shared, DK_DQ, half).load(WIDE).to(gl.float32)


@gluon.jit
def add_keys(shared, odd, dU_BK, half: gl.constexpr, FINE: gl.constexpr):
    """5. Adds what comes through keys and the tile's map."""
    come(shared, XT_DA, odd)
    X_own = block_at(shared, XT_DA, 2 * half)
    _round(X_own, FINE)
    if half == 0:
        tell(shared, XT_ROUNDED)
    dU_BK = add(transposed(X_own), half_at(shared, DK_DQ, half), dU_BK)
    if half == 1:
        X_far = block_at(shared, XT_DA, 1)
        _round(X_far, FINE)
        dU_BK = add(transposed(X_far), half_at(shared, DK_DQ, 0), dU_BK)
    come(shared, Q_Y, 1)
    Y_own = half_at(shared, Q_Y, half)
    _round(Y_own, FINE)
    if half == 0:
        tell(shared, Y_ROUNDED)
    dU_BK = warpgroup_mma_wait(0, deps=[dU_BK])
    leave(shared, DK_DQ)
    come(shared, DL_DP_K, 1 - odd)
    dU_BK = add(Y_own, transposed(square_at(shared, DL_DP_K)), dU_BK)
    return warpgroup_mma_wait(0, deps=[dU_BK])


@gluon.jit
def by_w(shared, odd, dU_BK, half: gl.constexpr):
    """The sums of rows of dU by W: a part of dbeta, less its sign."""
    return gl.sum(dU_BK * half_at(shared, odd, half).load(WIDE).to(gl.float32), 1)


@gluon.jit
def pass_Y(shared, odd, MT_far, beta_B, half: gl.constexpr):
    """6. Writes -diag(beta) dY in place of dq_left."""
    dY_BK = begin_wide(half_at(shared, odd, half), square_at(shared, DL_DP_K))
    come(shared, DK_DQ, 1)
    dq_own = half_at(shared, DK_DQ, half)
    dY_BK = add(own_M(shared, half), dq_own, dY_BK)
    if half == 0:
        dY_BK = add(MT_far, half_at(shared, DK_DQ, 1), dY_BK)
    dY_BK = warpgroup_mma_wait(0, deps=[dY_BK])
    leave(shared, DL_DP_K)
    if half == 0:
        tell(shared, DQ_READ)
    else:
        hear(shared, DQ_READ, odd)
    _put(dq_own, dY_BK * -beta_B[:, None])
    fence_async_shared()
    if half == 1:
        tell(shared, DY_WRITTEN)


@gluon.jit
def add_V(shared, odd, dw_BK, half: gl.constexpr):
    """7. Adds V, and writes it in place of the blocks of L that its own rows alone need. It is
    multiplied out twice: the compiler would add it much later, and keep both till then."""
    L_own, dY_own = block_at(shared, L_V, 2 * half), half_at(shared, DK_DQ, half)
    V_BK = begin_wide(transposed(L_own), dY_own)
    dw_BK = add(transposed(L_own), dY_own, dw_BK)
    if half == 0:
        L_far, dY_far = block_at(shared, L_V, 1), half_at(shared, DK_DQ, 1)
        hear(shared, DY_WRITTEN, odd)
        V_BK = add(transposed(L_far), dY_far, V_BK)
        dw_BK = add(transposed(L_far), dY_far, dw_BK)
    V_BK, dw_BK = warpgroup_mma_wait(0, deps=[V_BK, dw_BK])
    leave(shared, DK_DQ)
    _put(half_at(shared, L_V, half), V_BK)
    fence_async_shared()
    return dw_BK


@gluon.jit
def add_A(
    shared, odd, documents, dw_BK, ZT_own, ZT_far, betas,
    half: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """8. Writes -dA in place of X^T. Begins to add dA diag(beta) W."""
    V_own, X_own = half_at(shared, L_V, half), block_at(shared, XT_DA, 2 * half)
    if half == 0:
        dA_own = begin_square(V_own, transposed(half_at(shared, Q_Y, 0)))
        dA_own = warpgroup_mma_wait(0, deps=[add(ZT_own, X_own, dA_own)])
        leave(shared, Q_Y)
        leave(shared, L_V)
        dA_own = _of_earlier(dA_own, documents, shared[1], 0, 0, DOCUMENTS)
        left_own = left(_of_columns(dA_own, betas), X_own.dtype)
        dw_BK = add(left_own, half_at(shared, odd, 0), dw_BK)
        # The other one has read this block of X^T when it has written its own of dA.
        hear(shared, DA_WRITTEN, odd)
        _put(X_own, dA_own)
    else:
        X_first, X_far = block_at(shared, XT_DA, 0), block_at(shared, XT_DA, 1)
        hear(shared, XT_ROUNDED, odd)
        hear(shared, Y_ROUNDED, odd)
        hear(shared, 0, odd)
        dA_own = begin_square(V_own, transposed(half_at(shared, Q_Y, 1)))
        dA_own = add(ZT_far, X_far, dA_own)
        dA_own = warpgroup_mma_wait(0, deps=[add(ZT_own, X_own, dA_own)])
        dA_own = _of_earlier(dA_own, documents, shared[1], 1, 1, DOCUMENTS)
        left_own = left(_of_columns(dA_own, betas + BLOCK), X_own.dtype)
        dw_BK = add(left_own, half_at(shared, odd, 1), dw_BK)
        _put(X_own, dA_own)
        dA_far = add(ZT_far, X_first, begin_square(V_own, transposed(half_at(shared, Q_Y, 0))))
        dA_far, dw_BK = warpgroup_mma_wait(0, deps=[dA_far, dw_BK])
        leave(shared, Q_Y)
        leave(shared, L_V)
        dA_far = _of_earlier(dA_far, documents, shared[1], 1, 0, DOCUMENTS)
        left_far = left(_of_columns(dA_far, betas), X_own.dtype)
        dw_BK = add(left_far, half_at(shared, odd, 0), dw_BK)
        _put(X_far, dA_far)
    fence_async_shared()
    if half == 1:
        tell(shared, DA_WRITTEN)
    return dw_BK


@gluon.jit
def add_K(shared, odd, dw_BK, ZT_own, ZT_far, half: gl.constexpr):
    """9. Adds Z^T K."""
    come(shared, DL_DP_K, odd)
    dw_BK = add(ZT_own, half_at(shared, DL_DP_K, half), dw_BK)
    if half == 1:
        dw_BK = add(ZT_far, half_at(shared, DL_DP_K, 0), dw_BK)
    dw_BK = warpgroup_mma_wait(0, deps=[dw_BK])
    leave(shared, DL_DP_K)
    return dw_BK


@gluon.jit
def begin_U_of_A(shared, odd, half: gl.constexpr):
    """10. What comes through dA."""
    dU_BK = begin_wide(transposed(block_at(shared, XT_DA, 2 * half)), half_at(shared, odd, half))
    if half == 0:
        dU_BK = add(transposed(block_at(shared, XT_DA, 1)), half_at(shared, odd, 1), dU_BK)
    dU_BK = warpgroup_mma_wait(0, deps=[dU_BK])
    leave(shared, XT_DA)
    return dU_BK


# What these have in common


@gluon.jit
def _of_columns(x_BB, beta):
    """-x diag(beta)."""
    return x_BB * -gl.load(beta + gl.arange(0, BLOCK, COLUMN))[None, :]


@gluon.jit
def _put(into, x):
    into.store(x.to(into.dtype))


@gluon.jit
def _round(block, FINE: gl.constexpr):
    """Its FINE entries to the other operands' dtype."""
    x = gl.cast(block.load(VECTORS), FINE, bitcast=True)
    block.store(x.to(block.dtype))
    fence_async_shared()


@gluon.jit
def _of_later(
    x_BB, documents, zero, row: gl.constexpr, column: gl.constexpr, DOCUMENTS: gl.constexpr
):  # fmt: skip
    """x where the column's token is the row's or a later one of its document, else 0. `row` and
    `column` say which half of the tile they are in."""
    start_S, first = documents
    row_B, column_B = zero + gl.arange(0, BLOCK, ROW), gl.arange(0, BLOCK, COLUMN)
    if row == column:
        x_BB = gl.where(column_B[None, :] >= row_B[:, None], x_BB, 0.0)
    if DOCUMENTS:
        start_B = gl.load(start_S + first + column * BLOCK + column_B) - first - row * BLOCK
        x_BB = gl.where(row_B[:, None] >= start_B[None, :], x_BB, 0.0)
    return x_BB


@gluon.jit
def _of_earlier(
    x_BB, documents, zero, row: gl.constexpr, column: gl.constexpr, DOCUMENTS: gl.constexpr
):  # fmt: skip
    """x where the column's token is an earlier one than the row's, of its document, else 0."""
    start_S, first = documents
    row_B, column_B = zero + gl.arange(0, BLOCK, ROW), gl.arange(0, BLOCK, COLUMN)
    if row == column:
        x_BB = gl.where(column_B[None, :] < row_B[:, None], x_BB, 0.0)
    if DOCUMENTS:
        start_B = gl.load(start_S + first + row * BLOCK + row_B) - first - column * BLOCK
        x_BB = gl.where(column_B[None, :] >= start_B[:, None], x_BB, 0.0)
    return x_BB
