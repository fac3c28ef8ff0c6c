"""Where the operands of hopper_tile_gradients.py are in shared memory, and what its consumers tell
each other.

A place of 32 KiB is a square, two halves of its rows or four blocks of 64 x 64, as they ask for it.
"""

# Descriptors and barriers are for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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


@gluon.jit
def hidden(shared, i):
    """What all steps share, with another 0 of which the compiler does not know, in its second item.
    Without, it would make all steps' addresses once, before the loop, and have no registers for
    them."""
    views, zero, barriers = shared
    return views, (i + zero) >> 30, barriers


@gluon.jit
def block_at(shared, place, i):
    blocks, zero = shared[0][0], shared[1]
    return blocks.index(zero + 4 * place + i)


@gluon.jit
def half_at(shared, place, i):
    halves, zero = shared[0][1], shared[1]
    return halves.index(zero + 2 * place + i)


@gluon.jit
def own_M(shared, half: gl.constexpr):
    """Fourth blocks, where nothing is copied to."""
    if half == 0:
        return block_at(shared, XT_DA, 3)
    return block_at(shared, L_V, 3)


@gluon.jit
def square_at(shared, place):
    squares, zero = shared[0][2], shared[1]
    return squares.index(zero + place)


@gluon.jit
def come(shared, place, phase):
    """Waits until what the producer copies to a place is there."""
    full = shared[2][0]
    mbarrier.wait(full.index(place), phase)


@gluon.jit
def leave(shared, place):
    """What is at a place is not needed any more."""
    empty = shared[2][1]
    mbarrier.arrive(empty.index(place))


@gluon.jit
def tell(shared, word):
    words = shared[2][2]
    mbarrier.arrive(words.index(word))


@gluon.jit
def hear(shared, word, odd):
    words = shared[2][2]
    mbarrier.wait(words.index(word), odd)
