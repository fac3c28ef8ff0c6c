"""What attention's three kernels for Hopper share, with Householder maps and K = V = 128: each
program takes tile after tile of 128 tokens, and its two consumers own 64 of these each."""

# What is called here is for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mixtron.kernels.hopper_tools import accumulator, turn_of
from mixtron.kernels.path_attention.triton_tiles import TOGETHER

C = gl.constexpr(128)
"""Tokens of a tile; also K and V."""
OWN = gl.constexpr(64)
"""Of these a consumer's; also tokens of a block in backward."""
PAIRS = gl.constexpr(accumulator(64))
"""Of [OWN, OWN] in registers."""
WIDE = gl.constexpr(accumulator(128))
"""Of [OWN, C]."""
LANES = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def taken(n, tiles, heads):
    """The tile and the head of a program's n-th turn. The long tiles of several heads come before
    their short ones."""
    turn = turn_of(n)
    first = turn // (tiles * TOGETHER) * TOGETHER
    together = gl.minimum(heads - first, TOGETHER)
    turn -= first * tiles
    return tiles - 1 - turn // together, first + turn % together


@gluon.jit
def block_sum(x, first, end):
    """x[first .. end] in fp64, by each warp."""
    lane = gl.arange(0, 128, LANES)
    sum_x = gl.zeros([128], gl.float64, LANES)
    for i in range(first, end, 128):
        sum_x += gl.load(x + i + lane, i + lane < end, 0.0).to(gl.float64)
    return gl.sum(sum_x, 0)
