"""The tree of tiles over which queries and keys are carried.

Node j of level l are the tiles j 2^l .. (j + 1) 2^l. A tile of queries a and an earlier tile of
keys c part at the level of the highest bit in which they differ: there they lie in two sibling
nodes, c in the left one, which is even, a in the right one. Between these is an edge; to it the
queries are carried back and the keys forward, over the maps of the nodes between. So queries have a
version for every bit of a that is 1, keys for every bit of c that is 0, as far as their documents
reach, and from one version to the next it is one node:

    queries  v_l at the left edge of node a >> l,   then v_l P(l, (a >> l) - 1)
    keys     k_l at the right edge of node c >> l,  then k_l P(l, (c >> l) + 1)^T

With N tiles that is at most log2 N of each and half of it in the mean, and products of as many
maps. Queries cross even nodes alone, keys odd ones.

In memory the versions of a level lie pair by pair, those of the tiles of a node one after another:
of min(2^l, reach) tiles, because no others reach across the edge.
"""

import triton
import triton.language as tl


@triton.jit
def versions_at(level, tiles, reach):
    """The room for a level's versions, in tiles."""
    return ((((tiles - 1) >> level) + 1) >> 1) * tl.minimum(1 << level, reach)


@triton.jit
def query_version(a, level, reach):
    """Which of its level's versions tile a has."""
    inside = a & ((1 << level) - 1)
    return (a >> (level + 1)) * tl.minimum(1 << level, reach) + inside


@triton.jit
def key_version(c, level, reach):
    """Which of its level's versions tile c has: the last ones of a node reach across its edge."""
    room = tl.minimum(1 << level, reach)
    inside = (c & ((1 << level) - 1)) - (1 << level) + room
    return (c >> (level + 1)) * room + inside


@triton.jit
def first_tile(start_S, a, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The first tile that tile a's queries have keys in."""
    if DOCUMENTS:
        return tl.load(start_S + a * C) // C
    return 0 * a


@triton.jit
def last_tile(end_S, c, tiles, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The last tile that tile c's keys have queries in."""
    if DOCUMENTS:
        return (tl.load(end_S + c * C + C - 1) - 1) // C
    return tiles - 1
