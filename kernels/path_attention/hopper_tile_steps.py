"""The steps of hopper_tile_gradients.py, each for the rows of half a tile, and where things are in
shared memory meanwhile."""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mixtron.kernels.hopper_tools import accumulator, left_operand

C = gl.constexpr(128)
"""Tokens of a tile; also K."""
BLOCK = gl.constexpr(64)
PLACES = gl.constexpr(7)
"""In shared memory: two for W and dM in turn, then these, by what they have one after another."""
Q_Y, XT_DA, DK_DQ, DL_DP_K, L_V = (gl.constexpr(place) for place in range(2, 7))
XT_ROUNDED, Y_ROUNDED, DL_READ, DQ_READ = (gl.constexpr(word) for word in range(2, 6))
"""What the first consumer tells the second one; 0 is that it has rounded its half of W."""
DX_WRITTEN, ZT_WRITTEN, DY_WRITTEN, DA_WRITTEN = (gl.constexpr(word) for word in range(6, 10))
"""And the second one the first; 1 is of W. Each is told and heard once a tile. Nobody tells
the next tile's before the other one has heard this tile's: the second hears all of it before it
tells of dA, for which the first waits; the first hears of W, dX and Z before it tells of Y, of dY
before dq_left of the next tile is read, of dA before it goes on to that."""
WORDS = gl.constexpr(10)
SQUARE, WIDE = gl.constexpr(accumulator(64)), gl.constexpr(accumulator(128))
"""Of [BLOCK, BLOCK] and of [BLOCK, C] in registers."""
LEFT = gl.constexpr(left_operand(64))
ROW, COLUMN = gl.constexpr(gl.SliceLayout(1, SQUARE)), gl.constexpr(gl.SliceLayout(0, SQUARE))
ROW_WIDE = gl.constexpr(gl.SliceLayout(1, WIDE))
VECTORS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def hidden(shared, i):
    """What all steps share, with another 0 of which the compiler does not know, in its second item.
    Without, it would make all steps' addresses once, before the loop, and have no registers for
    them."""
    views, zero, barriers = shared
    return views, (i + zero) >> 30, barriers


@gluon.jit
def _block(shared, place, i):
    blocks, zero = shared[0][0], shared[1]
    return blocks.index(zero + 4 * place + i)


@gluon.jit
def _half(shared, place, i):
    halves, zero = shared[0][1], shared[1]
    return halves.index(zero + 2 * place + i)


@gluon.jit
def _own_M(shared, half: gl.constexpr):
    """Fourth blocks, where nothing is copied to."""
    if half == 0:
        return _block(shared, XT_DA, 3)
    return _block(shared, L_V, 3)


@gluon.jit
def _square(shared, place):
    squares, zero = shared[0][2], shared[1]
    return squares.index(zero + place)


@gluon.jit
def _come(shared, place, phase):
    """Waits until what the producer copies to a place is there."""
    full = shared[2][0]
    mbarrier.wait(full.index(place), phase)


@gluon.jit
def leave(shared, place):
    """What is at a place is not needed any more."""
    empty = shared[2][1]
    mbarrier.arrive(empty.index(place))


@gluon.jit
def _tell(shared, word):
    words = shared[2][2]
    mbarrier.arrive(words.index(word))


@gluon.jit
def _hear(shared, word, odd):
    words = shared[2][2]
    mbarrier.wait(words.index(word), odd)


@gluon.jit
def begin_M(
    shared, odd, documents, scale,
    half: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """1. Writes the own block of M^T before beta. Returns the first half's far one."""
    _come(shared, odd, odd)
    w_own = _half(shared, odd, half)
    _round(w_own, FINE)
    _tell(shared, half)
    _come(shared, Q_Y, 0)
    M_own = _begin_square(w_own, _T(_half(shared, Q_Y, half)))
    M_far = M_own
    if half == 0:
        M_far = _begin_square(w_own, _T(_half(shared, Q_Y, 1)))
    M_own, M_far = warpgroup_mma_wait(0, deps=[M_own, M_far])
    M_own = _of_later(M_own * scale, documents, shared[1], half, half, DOCUMENTS)
    _put(_own_M(shared, half), M_own)
    fence_async_shared()
    if half == 0:
        M_far = _of_later(M_far * scale, documents, shared[1], 0, 1, DOCUMENTS)
    return _left(M_far, w_own.dtype)


@gluon.jit
def pass_X(shared, odd, MT_far, beta_B, half: gl.constexpr):
    """2. Writes -diag(beta) dX in place of dlogits; its far block, where dlogits are still read, to
    the fourth block there. Returns dlogits^T Q."""
    _come(shared, DL_DP_K, odd)
    _come(shared, DK_DQ, 0)
    w_own, q_own = _half(shared, odd, half), _half(shared, Q_Y, half)
    MT_own = _own_M(shared, half)
    d_own, d_far = _block(shared, DL_DP_K, 2 * half), _block(shared, DL_DP_K, 1)
    dX_own = _begin_square(MT_own, d_own)
    if half == 0:
        dX_own = _add(MT_far, d_far, dX_own)
    dX_own = _add(w_own, _T(_half(shared, DK_DQ, half)), dX_own)
    dk_BK = _begin_wide(_T(d_own), q_own)
    dX_far = dX_own
    if half == 0:
        dk_BK = _add(_T(d_far), _half(shared, Q_Y, 1), dk_BK)
        dX_own, dk_BK = warpgroup_mma_wait(0, deps=[dX_own, dk_BK])
        _tell(shared, DL_READ)
    else:
        dX_far = _begin_square(MT_own, d_far)
        dX_far = _add(w_own, _T(_half(shared, DK_DQ, 0)), dX_far)
        dX_own, dX_far, dk_BK = warpgroup_mma_wait(0, deps=[dX_own, dX_far, dk_BK])
        _put(_block(shared, DL_DP_K, 3), dX_far * -beta_B[:, None])
    _put(d_own, dX_own * -beta_B[:, None])
    fence_async_shared()
    if half == 1:
        _tell(shared, DX_WRITTEN)
    return dk_BK


@gluon.jit
def begin_U(shared, odd, half: gl.constexpr, FINE: gl.constexpr):
    """3. What comes through queries. Also rounds L, while there is room in registers."""
    _come(shared, L_V, odd)
    _round(_block(shared, L_V, 2 * half), FINE)
    if half == 0:
        _round(_block(shared, L_V, 1), FINE)
    place = 1 - odd
    _come(shared, place, odd)
    dU_BK = _begin_wide(_T(_block(shared, place, 2 * half)), _half(shared, Q_Y, half))
    if half == 0:
        dU_BK = _add(_T(_block(shared, place, 1)), _half(shared, Q_Y, 1), dU_BK)
    dU_BK = warpgroup_mma_wait(0, deps=[dU_BK])
    leave(shared, Q_Y)
    leave(shared, place)
    return dU_BK


@gluon.jit
def pass_Z(shared, odd, documents, half: gl.constexpr, DOCUMENTS: gl.constexpr):
    """4. Writes Z^T in place of dX and dlogits. Returns blocks as left operands."""
    L_own, L_far = _block(shared, L_V, 2 * half), _block(shared, L_V, 1)
    d_own, dX_far = _block(shared, DL_DP_K, 2 * half), _block(shared, DL_DP_K, 3)
    Z_own = _begin_square(_T(L_own), d_own)
    if half == 0:
        _hear(shared, DX_WRITTEN, odd)
        Z_own = _add(_T(L_far), dX_far, Z_own)
    Z_own = warpgroup_mma_wait(0, deps=[Z_own])
    Z_own = _of_earlier(Z_own, documents, shared[1], half, half, DOCUMENTS).to(d_own.dtype)
    d_own.store(Z_own)
    Z_own = gl.convert_layout(Z_own, LEFT)
    Z_far = Z_own
    if half == 1:
        Z_far = warpgroup_mma_wait(0, deps=[_begin_square(_T(L_own), dX_far)])
        Z_far = _of_earlier(Z_far, documents, shared[1], 1, 0, DOCUMENTS).to(d_own.dtype)
        _hear(shared, DL_READ, odd)
        _block(shared, DL_DP_K, 1).store(Z_far)
        Z_far = gl.convert_layout(Z_far, LEFT)
    fence_async_shared()
    if half == 1:
        _tell(shared, ZT_WRITTEN)
    return Z_own, Z_far


@gluon.jit
def add_Z(shared, odd, dk_BK, half: gl.constexpr):
    """4. Adds Z W and dk_right."""
    w_own = _half(shared, odd, half)
    dk_BK = _add(_T(_block(shared, DL_DP_K, 2 * half)), w_own, dk_BK)
    if half == 0:
        _hear(shared, 1, odd)
        _hear(shared, ZT_WRITTEN, odd)
        dk_BK = _add(_T(_block(shared, DL_DP_K, 1)), _half(shared, odd, 1), dk_BK)
    dk_BK = warpgroup_mma_wait(0, deps=[dk_BK])
    leave(shared, DL_DP_K)
    return dk_BK + _half(shared, DK_DQ, half).load(WIDE).to(gl.float32)


@gluon.jit
def add_keys(shared, odd, dU_BK, half: gl.constexpr, FINE: gl.constexpr):
    """5. Adds what comes through keys and the tile's map."""
    _come(shared, XT_DA, odd)
    X_own = _block(shared, XT_DA, 2 * half)
    _round(X_own, FINE)
    if half == 0:
        _tell(shared, XT_ROUNDED)
    dU_BK = _add(_T(X_own), _half(shared, DK_DQ, half), dU_BK)
    if half == 1:
        X_far = _block(shared, XT_DA, 1)
        _round(X_far, FINE)
        dU_BK = _add(_T(X_far), _half(shared, DK_DQ, 0), dU_BK)
    _come(shared, Q_Y, 1)
    Y_own = _half(shared, Q_Y, half)
    _round(Y_own, FINE)
    if half == 0:
        _tell(shared, Y_ROUNDED)
    dU_BK = warpgroup_mma_wait(0, deps=[dU_BK])
    leave(shared, DK_DQ)
    _come(shared, DL_DP_K, 1 - odd)
    dU_BK = _add(Y_own, _T(_square(shared, DL_DP_K)), dU_BK)
    return warpgroup_mma_wait(0, deps=[dU_BK])


@gluon.jit
def by_w(shared, odd, dU_BK, half: gl.constexpr):
    """The sums of rows of dU by W: a part of dbeta, less its sign."""
    return gl.sum(dU_BK * _half(shared, odd, half).load(WIDE).to(gl.float32), 1)


@gluon.jit
def pass_Y(shared, odd, MT_far, beta_B, half: gl.constexpr):
    """6. Writes -diag(beta) dY in place of dq_left."""
    dY_BK = _begin_wide(_half(shared, odd, half), _square(shared, DL_DP_K))
    _come(shared, DK_DQ, 1)
    dq_own = _half(shared, DK_DQ, half)
    dY_BK = _add(_own_M(shared, half), dq_own, dY_BK)
    if half == 0:
        dY_BK = _add(MT_far, _half(shared, DK_DQ, 1), dY_BK)
    dY_BK = warpgroup_mma_wait(0, deps=[dY_BK])
    leave(shared, DL_DP_K)
    if half == 0:
        _tell(shared, DQ_READ)
    else:
        _hear(shared, DQ_READ, odd)
    _put(dq_own, dY_BK * -beta_B[:, None])
    fence_async_shared()
    if half == 1:
        _tell(shared, DY_WRITTEN)


@gluon.jit
def add_V(shared, odd, dw_BK, half: gl.constexpr):
    """7. Adds V, and writes it in place of the blocks of L that its own rows alone need. It is
    multiplied out twice: the compiler would add it much later, and keep both till then."""
    L_own, dY_own = _block(shared, L_V, 2 * half), _half(shared, DK_DQ, half)
    V_BK = _begin_wide(_T(L_own), dY_own)
    dw_BK = _add(_T(L_own), dY_own, dw_BK)
    if half == 0:
        L_far, dY_far = _block(shared, L_V, 1), _half(shared, DK_DQ, 1)
        _hear(shared, DY_WRITTEN, odd)
        V_BK = _add(_T(L_far), dY_far, V_BK)
        dw_BK = _add(_T(L_far), dY_far, dw_BK)
    V_BK, dw_BK = warpgroup_mma_wait(0, deps=[V_BK, dw_BK])
    leave(shared, DK_DQ)
    _put(_half(shared, L_V, half), V_BK)
    fence_async_shared()
    return dw_BK


@gluon.jit
def add_A(
    shared, odd, documents, dw_BK, ZT_own, ZT_far, betas,
    half: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """8. Writes -dA in place of X^T. Begins to add dA diag(beta) W."""
    V_own, X_own = _half(shared, L_V, half), _block(shared, XT_DA, 2 * half)
    if half == 0:
        dA_own = _begin_square(V_own, _T(_half(shared, Q_Y, 0)))
        dA_own = warpgroup_mma_wait(0, deps=[_add(ZT_own, X_own, dA_own)])
        leave(shared, Q_Y)
        leave(shared, L_V)
        dA_own = _of_earlier(dA_own, documents, shared[1], 0, 0, DOCUMENTS)
        left_own = _left(_of_columns(dA_own, betas), X_own.dtype)
        dw_BK = _add(left_own, _half(shared, odd, 0), dw_BK)
        # The other one has read this block of X^T when it has written its own of dA.
        _hear(shared, DA_WRITTEN, odd)
        _put(X_own, dA_own)
    else:
        X_first, X_far = _block(shared, XT_DA, 0), _block(shared, XT_DA, 1)
        _hear(shared, XT_ROUNDED, odd)
        _hear(shared, Y_ROUNDED, odd)
        _hear(shared, 0, odd)
        dA_own = _begin_square(V_own, _T(_half(shared, Q_Y, 1)))
        dA_own = _add(ZT_far, X_far, dA_own)
        dA_own = warpgroup_mma_wait(0, deps=[_add(ZT_own, X_own, dA_own)])
        dA_own = _of_earlier(dA_own, documents, shared[1], 1, 1, DOCUMENTS)
        left_own = _left(_of_columns(dA_own, betas + BLOCK), X_own.dtype)
        dw_BK = _add(left_own, _half(shared, odd, 1), dw_BK)
        _put(X_own, dA_own)
        dA_far = _add(ZT_far, X_first, _begin_square(V_own, _T(_half(shared, Q_Y, 0))))
        dA_far, dw_BK = warpgroup_mma_wait(0, deps=[dA_far, dw_BK])
        leave(shared, Q_Y)
        leave(shared, L_V)
        dA_far = _of_earlier(dA_far, documents, shared[1], 1, 0, DOCUMENTS)
        left_far = _left(_of_columns(dA_far, betas), X_own.dtype)
        dw_BK = _add(left_far, _half(shared, odd, 0), dw_BK)
        _put(X_far, dA_far)
    fence_async_shared()
    if half == 1:
        _tell(shared, DA_WRITTEN)
    return dw_BK


@gluon.jit
def add_K(shared, odd, dw_BK, ZT_own, ZT_far, half: gl.constexpr):
    """9. Adds Z^T K."""
    _come(shared, DL_DP_K, odd)
    dw_BK = _add(ZT_own, _half(shared, DL_DP_K, half), dw_BK)
    if half == 1:
        dw_BK = _add(ZT_far, _half(shared, DL_DP_K, 0), dw_BK)
    dw_BK = warpgroup_mma_wait(0, deps=[dw_BK])
    leave(shared, DL_DP_K)
    return dw_BK


@gluon.jit
def begin_U_of_A(shared, odd, half: gl.constexpr):
    """10. What comes through dA."""
    dU_BK = _begin_wide(_T(_block(shared, XT_DA, 2 * half)), _half(shared, odd, half))
    if half == 0:
        dU_BK = _add(_T(_block(shared, XT_DA, 1)), _half(shared, odd, 1), dU_BK)
    dU_BK = warpgroup_mma_wait(0, deps=[dU_BK])
    leave(shared, XT_DA)
    return dU_BK


# What these have in common


@gluon.jit
def _T(block):
    return block.permute((1, 0))


@gluon.jit
def _begin_square(x, y):
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, SQUARE)
    return warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)


@gluon.jit
def _begin_wide(x, y):
    zeros = gl.zeros([BLOCK, C], gl.float32, WIDE)
    return warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(x, y, sum):
    return warpgroup_mma(x, y, sum, is_async=True)


@gluon.jit
def _left(x_BB, DTYPE: gl.constexpr):
    """As a product's left operand."""
    return gl.convert_layout(x_BB.to(DTYPE), LEFT)


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
