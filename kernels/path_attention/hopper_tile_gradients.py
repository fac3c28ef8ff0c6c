"""The gradient of tiles' keys, w and beta on Hopper, with K = 128, tiles of 128 tokens and as many
query heads as keys: what triton_tile_gradients.py computes, by three groups of warps.

A multiprocessor has one program, which takes tile after tile. A producer copies operands into
shared memory, each once a tile, as places there become free: ahead of their use, and the next
tile's while this one is computed. Two consumers (hopper_tile_steps.py) own the rows of half a tile
each. "own" and "far" are the 64 x 64 blocks on and off the diagonal in their rows; of a triangle
the block on the other side is not there, neither in memory nor in products. Matrices are turned so
that a row is a row of W. dk [64, 128] is in registers from 2 to 4, dU from 3 to 5, dw from 5 to 10:

    1 MT = scale W Q^T, a left operand until 6, of which the own block is in shared memory
    2 dX = MT dlogits + W dk_right^T, of which -diag(beta) dX goes to shared memory
      dk = dlogits^T Q
    3 dU = dM^T Q
    4 Z^T = -tril(L^T diag(beta) dX, -1), a left operand until 9, and in shared memory for
      dk = scale dk + Z W + dk_right, which is written
    5 dU += X dk_right + Y dP^T, of which are made
      dbeta = -rowsum(dU W) and dw = -diag(beta) dU
    6 dY = MT dq_left + W dP, of which -diag(beta) dY goes to shared memory
    7 V = -L^T diag(beta) dY, to shared memory too
      dw += V
    8 dA = -tril(Z^T X^T + V Y^T, -1), of which -dA goes to shared memory
      dw += dA diag(beta) W
    9 dw += Z^T K
    10 dU = -dA^T W, the rest of dbeta and of dw, which are written

No step has more than two sums [64, 128] (128 registers of a thread), a block (32) and operands from
before (32). Because of triangles, the second consumer needs nothing of the first one but operands
that this has rounded from fp16 to bf16, and the first one the second's far blocks of dX, Z^T and dA
and its rows of dY.

Of seven places in shared memory, 32 KiB each,
    0 and 1 have W (1 to 10) and dM (3), in the next tile the other way round
    2 has Q (1 to 3), Y (5 to 8)
    3 has X^T (5 to 8), -dA (8 to 10)
    4 has dk_right (2 to 5), dq_left (6), dY (6, 7)
    5 has dlogits (2), dX and Z^T (2 to 4), dP (5, 6), K (9)
    6 has L (3 to 7), V (7, 8).

A tile takes 106 products of 64 x 64 x 64 (4 microseconds of a multiprocessor at the full rate) and
reads 320 KiB and writes 96 (13 microseconds at its part of the memory's rate).

Where Triton's form takes W in fp16, for dbeta and for diag(beta) W, this takes it in bf16 as in all
other products; beta is put to dA instead, before that is rounded.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from mixtron.kernels.hopper_tools import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    SWIZZLED,
    barriers,
    turn_of,
    turns,
)
from mixtron.kernels.path_attention.hopper_tile_places import (
    DK_DQ,
    DL_DP_K,
    L_V,
    PLACES,
    Q_Y,
    WORDS,
    XT_DA,
    hidden,
    leave,
)
from mixtron.kernels.path_attention.hopper_tile_steps import (
    ROW_WIDE,
    WIDE,
    add_A,
    add_K,
    add_keys,
    add_V,
    add_Z,
    begin_M,
    begin_U,
    begin_U_of_A,
    by_w,
    pass_X,
    pass_Y,
    pass_Z,
)
from mixtron.kernels.path_attention.hopper_tiles import BLOCK, ROW, C

KEY = gl.constexpr(gl.SliceLayout(0, WIDE))
VARYING = ("T", "S", "heads", "G", "nodes", "work", "dbeta")
"""A piece's dbeta may begin at any head: not on 16 bytes."""


@gluon.jit(do_not_specialize=VARYING)
def hopper_tile_gradient_kernel(
    q, k, w, L, XT, Y, dlogits, dM, dq_left, dk_right, dmaps,
    beta, start_S, dk, dw, dbeta, scale, T, S, heads, G, nodes, work,
    FINE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """dk, dw and dbeta of all tiles.

    The first eleven are descriptors: of [B T, G K] for q and k, of matrices with 128 columns for
    the others, in boxes of 64 rows and all columns of a head, of 64 for the triangles L, XT,
    dlogits and dM, of 128 rows for dmaps. w, L, XT and Y are FINE, given as if of q's dtype. `work`
    is the number of tiles of all heads. The rest as in triton_tile_gradients.py.
    """
    memory = gl.allocate_shared_memory(q.dtype, [4 * PLACES, BLOCK, BLOCK], SWIZZLED)
    halves = memory._reinterpret(q.dtype, [2 * PLACES, BLOCK, C], SWIZZLED)
    squares = memory._reinterpret(q.dtype, [PLACES, C, C], SWIZZLED)
    views = memory, halves, squares
    full, empty, words = barriers(PLACES, 1), barriers(PLACES, 2), barriers(WORDS, 1)
    fence_async_shared()
    sizes = T, S, heads, G, nodes, work
    operands = q, k, w, L, XT, Y, dlogits, dM, dq_left, dk_right, dmaps
    shared = views, (full, empty, words), (beta, start_S), (dk, dw, dbeta), scale, sizes
    gl.warp_specialize(
        [
            (_consume, (shared, 0, FINE, DOCUMENTS)),
            (_consume, (shared, 1, FINE, DOCUMENTS)),
            (_produce, (views, (full, empty), operands, sizes)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _tile(i, sizes):
    """The program's i-th tile: its number, head and row of the batch. Heads of the same tokens come
    one after another: their numbers lie beside each other in memory."""
    _, S, _, G, _, _ = sizes
    turn = turn_of(i)
    return turn // G % (S // C), turn % G, turn // (G * (S // C))


# The producer


@gluon.jit
def _produce(views, barriers, operands, sizes):
    """Copies in the order in which places become free, which is that of their use but for those
    of the next tile."""
    q, k, w, L, XT, Y, dlogits, dM, dq_left, dk_right, dmaps = operands
    T, S, _, G, nodes, work = sizes
    count = turns(work)
    for i in range(-1, count):
        n, g, b = _tile(gl.maximum(i, 0), sizes)
        next_n, next_g, next_b = _tile(gl.minimum(i + 1, count - 1), sizes)
        row = (b * G + g) * S + n * C
        next_row = (next_b * G + next_g) * S + next_n * C
        now, later, odd = i >= 0, i + 1 < count, i & 1
        _copy_triangle(views, barriers, 1 - odd, 1 - odd, dM, row, 1, now)
        _copy_triangle(views, barriers, XT_DA, 1 - odd, XT, row, 0, now)
        _copy(views, barriers, Q_Y, 0, Y, row, 0, now)
        _copy_square(views, barriers, DL_DP_K, odd, dmaps, ((b * G + g) * nodes + n) * C, now)
        _copy(views, barriers, DK_DQ, 0, dq_left, row, 0, now)
        _copy(views, barriers, 1 - odd, odd, w, next_row, 0, later)
        _copy(views, barriers, DL_DP_K, 1 - odd, k, b * T + n * C, g * C, now)
        _copy(views, barriers, DK_DQ, 1, dk_right, next_row, 0, later)
        _copy(views, barriers, Q_Y, 1, q, next_b * T + next_n * C, next_g * C, later)
        _copy_triangle(views, barriers, L_V, odd, L, next_row, 1, later)
        _copy_triangle(views, barriers, DL_DP_K, odd, dlogits, next_row, 1, later)


@gluon.jit
def _copy(views, barriers, place, phase, matrix, row, column, pred):
    """128 rows to a place, when what was there in that phase is not needed any more."""
    _, halves, _ = views
    full, empty = barriers
    mbarrier.wait(empty.index(place), phase, pred=pred)
    mbarrier.expect(full.index(place), 2 * matrix.block_type.nbytes, pred=pred)
    for i in gl.static_range(2):
        into = halves.index(2 * place + i)
        tma.async_copy_global_to_shared(
            matrix, [row + i * BLOCK, column], full.index(place), into, pred=pred
        )


@gluon.jit
def _copy_square(views, barriers, place, phase, matrix, row, pred):
    """The same in one box."""
    _, _, squares = views
    full, empty = barriers
    mbarrier.wait(empty.index(place), phase, pred=pred)
    mbarrier.expect(full.index(place), matrix.block_type.nbytes, pred=pred)
    into = squares.index(place)
    tma.async_copy_global_to_shared(matrix, [row, 0], full.index(place), into, pred=pred)


@gluon.jit
def _copy_triangle(views, barriers, place, phase, matrix, row, OFF_ROW: gl.constexpr, pred):
    """Three blocks: of the two off the diagonal that in row OFF_ROW is there, and comes second."""
    blocks, _, _ = views
    full, empty = barriers
    mbarrier.wait(empty.index(place), phase, pred=pred)
    mbarrier.expect(full.index(place), 3 * matrix.block_type.nbytes, pred=pred)
    for i in gl.static_range(3):
        down, right = i // 2 + i % 2 * OFF_ROW, i // 2 + i % 2 * (1 - OFF_ROW)
        at, into = [row + down * BLOCK, right * BLOCK], blocks.index(4 * place + i)
        tma.async_copy_global_to_shared(matrix, at, full.index(place), into, pred=pred)


# The consumers


@gluon.jit
def _consume(everything, half: gl.constexpr, FINE: gl.constexpr, DOCUMENTS: gl.constexpr):
    """Half of all tiles' rows."""
    views, barriers, inputs, outputs, scale, sizes = everything
    beta, start_S = inputs
    dk, dw, dbeta = outputs
    T, S, heads, G, _, work = sizes
    for i in range(turns(work)):
        odd = i & 1
        n, g, b = _tile(i, sizes)
        betas, documents = beta + (b * G + g) * S + n * C, (start_S, n * C)
        to = b * T + n * C, g, n * C, T, heads
        beta_B = gl.load(betas + half * BLOCK + gl.arange(0, BLOCK, ROW))
        beta_W = gl.convert_layout(beta_B, ROW_WIDE)

        at = views, i >> 30, barriers
        MT_far = begin_M(at, odd, documents, scale, half, FINE, DOCUMENTS)
        at = hidden(at, i)
        dk_BK = pass_X(at, odd, MT_far, beta_B, half)
        at = hidden(at, i)
        dU_BK = begin_U(at, odd, half, FINE)
        at = hidden(at, i)
        ZT_own, ZT_far = pass_Z(at, odd, documents, half, DOCUMENTS)
        at = hidden(at, i)
        dk_BK = add_Z(at, odd, dk_BK * scale, half)
        _write_rows(dk, to, dk_BK, half)
        at = hidden(at, i)
        dU_BK = add_keys(at, odd, dU_BK, half, FINE)
        at = hidden(at, i)
        dbeta_B = by_w(at, odd, dU_BK, half)
        at = hidden(at, i)
        pass_Y(at, odd, MT_far, beta_W, half)
        at = hidden(at, i)
        dw_BK = add_V(at, odd, dU_BK * -beta_W[:, None], half)
        at = hidden(at, i)
        dw_BK = add_A(at, odd, documents, dw_BK, ZT_own, ZT_far, betas, half, DOCUMENTS)
        at = hidden(at, i)
        dw_BK = add_K(at, odd, dw_BK, ZT_own, ZT_far, half)
        at = hidden(at, i)
        dU_BK = begin_U_of_A(at, odd, half)
        at = hidden(at, i)
        dbeta_B += by_w(at, odd, dU_BK, half)
        leave(at, odd)
        _write_numbers(dbeta, to, -dbeta_B, half)
        _write_rows(dw, to, dw_BK - beta_W[:, None] * dU_BK, half)


@gluon.jit
def _write_rows(out, to, x_BK, half: gl.constexpr):
    """Rows of one head, as far as there are tokens."""
    token, g, first, T, heads = to
    row_B, key_K = half * BLOCK + gl.arange(0, BLOCK, ROW_WIDE), gl.arange(0, C, KEY)
    out += token.to(gl.int64) * heads * C + g * C
    pointers = out + (row_B * (heads * C))[:, None] + key_K[None, :]
    gl.store(pointers, x_BK.to(out.dtype.element_ty), (first + row_B < T)[:, None])


@gluon.jit
def _write_numbers(out, to, x_B, half: gl.constexpr):
    """The same of numbers."""
    token, g, first, T, heads = to
    row_B = half * BLOCK + gl.arange(0, BLOCK, ROW_WIDE)
    gl.store(out + (token + row_B) * heads + g, x_B, first + row_B < T)
