"""What the kernels of single tiles share on an H100 or H200, with K = 128 and tiles of 128 tokens.

Each multiprocessor has one program, which takes tile after tile. A producer warp copies what these
need into rings in shared memory, in the order of its use and ahead of it, also of the next tile;
two consumers of four warps own 64 rows of a tile each. So nobody waits for memory's latency, only
for its rate. A consumer's rows stay in registers from product to product.

A 128 x 128 matrix lies in shared memory as four blocks of 64 x 64 (8 KiB), row by row. Of a
triangular one three are there: the diagonal's and between these the one beside it. 64 rows in
registers are two blocks: x_0 of the left columns, x_1 of the right ones.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mixtron.kernels.hopper_tools import accumulator, barriers, left_operand

C = gl.constexpr(128)
"""Tokens of a tile; also K."""
BLOCK = gl.constexpr(64)
SQUARE = gl.constexpr(accumulator(64))
LEFT = gl.constexpr(left_operand(64))
ROW = gl.constexpr(gl.SliceLayout(1, SQUARE.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, SQUARE.value))


# A program's tiles: the i-th together with the i-th from the end, which has versions where that one
# has none. So all pairs take about as long.


@gluon.jit
def pairs(tiles):
    return (tiles + 1) // 2


@gluon.jit
def of_pair(pair, tiles):
    """The head, and the range of its two tiles, or of the one in the middle."""
    head, i = pair // pairs(tiles), pair % pairs(tiles)
    return head, i, tiles - i, gl.maximum(tiles - 1 - 2 * i, 1)


# Rings of matrices. The n-th of a program, counted from 0, lies in slot n % SLOTS. Who reads a part
# of it waits for all of it, and frees it.


@gluon.jit
def ring(descriptor, SLOTS: gl.constexpr):
    """Room for matrices that come through descriptors of 64 x 64 boxes like this one, for two
    readers."""
    blocks = gl.allocate_shared_memory(
        descriptor.dtype, [4 * SLOTS, BLOCK, BLOCK], descriptor.layout
    )
    return blocks, barriers(SLOTS, 1), barriers(SLOTS, 2)


@gluon.jit
def fill(ring, n, matrix, row, column):
    """Asks for rows and columns `row`, `column` .. + 127 of a matrix when the slot is free."""
    blocks, slot, full = _begin_fill(ring, n, matrix, 4)
    for i in gl.static_range(4):
        at = [row + i // 2 * BLOCK, column + i % 2 * BLOCK]
        tma.async_copy_global_to_shared(matrix, at, full, blocks.index(4 * slot + i))


@gluon.jit
def fill_triangle(ring, n, matrix, row, ASIDE_ROW: gl.constexpr):
    """The same of columns 0 .. 127 of a triangular matrix; ASIDE_ROW is 1 of a lower one."""
    blocks, slot, full = _begin_fill(ring, n, matrix, 3)
    aside = [row + ASIDE_ROW * BLOCK, (1 - ASIDE_ROW) * BLOCK]
    tma.async_copy_global_to_shared(matrix, [row, 0], full, blocks.index(4 * slot))
    tma.async_copy_global_to_shared(matrix, aside, full, blocks.index(4 * slot + 1))
    tma.async_copy_global_to_shared(matrix, [row + BLOCK, BLOCK], full, blocks.index(4 * slot + 2))


@gluon.jit
def _begin_fill(ring, n, matrix, COUNT: gl.constexpr):
    blocks, full, empty = ring
    SLOTS: gl.constexpr = blocks.shape[0] // 4
    slot = n % SLOTS
    mbarrier.wait(empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    mbarrier.expect(full.index(slot), COUNT * matrix.block_type.nbytes)
    return blocks, slot, full.index(slot)


@gluon.jit
def take(ring, n):
    """The blocks of the n-th matrix, when they have come; of a triangular one the first three."""
    blocks, full, _ = ring
    SLOTS: gl.constexpr = blocks.shape[0] // 4
    slot = n % SLOTS
    mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
    first = 4 * slot
    last = first + 3
    return blocks.index(first), blocks.index(first + 1), blocks.index(first + 2), blocks.index(last)


@gluon.jit
def free(ring, n):
    """One reader does not need the n-th matrix any more."""
    blocks, _, empty = ring
    SLOTS: gl.constexpr = blocks.shape[0] // 4
    mbarrier.arrive(empty.index(n % SLOTS))


@gluon.jit
def take_half(ring, n, HALF: gl.constexpr):
    """The two blocks of half its rows."""
    x_00, x_01, x_10, x_11 = take(ring, n)
    if HALF == 0:
        x_0, x_1 = x_00, x_01
    else:
        x_0, x_1 = x_10, x_11
    return x_0, x_1


# Products


@gluon.jit
def transposed(block):
    return block.permute((1, 0))


@gluon.jit
def left_block(block, DTYPE: gl.constexpr):
    """A block as a product's left operand."""
    return block.load(LEFT).to(DTYPE)


@gluon.jit
def sum_block(block):
    """A block as what products are added to."""
    return block.load(SQUARE).to(gl.float32)


@gluon.jit
def left(x_BB, DTYPE: gl.constexpr):
    """As a product's left operand."""
    return gl.convert_layout(x_BB.to(DTYPE), LEFT)


@gluon.jit
def begin(x_0, x_1, y_0, y_1):
    """Begins x_0 y_0 + x_1 y_1."""
    zeros_BB = gl.zeros([BLOCK, BLOCK], gl.float32, SQUARE)
    sum_BB = warpgroup_mma(x_0, y_0, zeros_BB, use_acc=False, is_async=True)
    return warpgroup_mma(x_1, y_1, sum_BB, is_async=True)


@gluon.jit
def times(x_0, x_1, y_00, y_01, y_10, y_11, DTYPE: gl.constexpr):
    """x y, x being rounded to DTYPE."""
    x_0, x_1 = left(x_0, DTYPE), left(x_1, DTYPE)
    product_0, product_1 = begin(x_0, x_1, y_00, y_10), begin(x_0, x_1, y_01, y_11)
    return warpgroup_mma_wait(0, deps=[product_0, product_1])


# Results


@gluon.jit
def write(matrix, row, column, through_s, x_BB):
    """Begins to write a block, its bits as of the matrix's dtype, through a block of shared memory
    that is not being written any more."""
    through_s.store(gl.cast(x_BB, through_s.dtype, bitcast=True))
    fence_async_shared()
    tma.async_copy_shared_to_global(matrix, [row, column], through_s)


@gluon.jit
def write_rows(matrix, row, out_s, x_0, x_1, HALF: gl.constexpr):
    """Begins to write half a tile of a matrix of 128 columns, through two of the four blocks of
    `out_s`, when what this consumer wrote before has left them."""
    tma.store_wait(0)
    out_s.index(2 * HALF).store(x_0.to(matrix.dtype))
    out_s.index(2 * HALF + 1).store(x_1.to(matrix.dtype))
    fence_async_shared()
    for i in gl.static_range(2):
        at = [row + HALF * BLOCK, i * BLOCK]
        tma.async_copy_shared_to_global(matrix, at, out_s.index(2 * HALF + i))
