"""What attention's three kernels for Hopper share, with Householder maps and K = V = 128: each
program takes a tile of 128 tokens, and its two consumers own 64 of these each."""

# What is called here is for Gluon's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mixtron.kernels.hopper_tools import accumulator
from mixtron.kernels.path_attention.triton_tiles import longest_first

C = gl.constexpr(128)
"""Tokens of a tile; also K and V."""
OWN = gl.constexpr(64)
"""Of these a consumer's; also tokens of a block in backward."""
PAIRS = gl.constexpr(accumulator(64))
"""Of [OWN, OWN] in registers."""
WIDE = gl.constexpr(accumulator(128))
"""Of [OWN, C]."""


@gluon.jit
def taken():
    """Of a grid (tiles, heads): which tile, counted from that of most work, and which head."""
    turn, head = longest_first()
    return turn, head.to(gl.int32)


@gluon.jit
def sums_of_threads(x_NM):
    """Over a row of an accumulator [OWN, OWN], by each thread of what it has: [OWN, 8]."""
    return gl.sum(x_NM.reshape([OWN, 8, 8]), 1)
