"""Sums of log gates in the pieces that the kernels add up, and the gate's gradient."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.triton_tools import INTERPRETED, LOG2_E

LEAST = tl.constexpr(-64.0)
"""Beyond that nothing is left, and larger sums would cost the others their precision."""
CHUNK = 128 if INTERPRETED else 1024


@dataclass
class GateSums:
    """In units of log 2."""

    tokens_4BHS: Tensor
    """From the left edge of each token's tile to the token, its own included, and behind the token
    to the tile's right edge; the same for blocks."""
    blocks_BHN: Tensor
    """Of whole blocks."""
    edges: "EdgeSums | None" = None
    """For the kernels that take them in place of blocks' sums."""

    def part(self, rows: slice, heads: slice) -> "GateSums":
        """Views."""
        edges = self.edges
        if edges is not None:
            edges = EdgeSums(*(x[:, rows, heads] for x in vars(edges).values()))
        return GateSums(self.tokens_4BHS[:, rows, heads], self.blocks_BHN[rows, heads], edges)


@dataclass
class EdgeSums:
    """Of tokens in nodes of each level (triton_tree.py): queries and keys that part there meet at
    the edge between two, and the gates between them are the keys' up to it and the queries' from
    it on. All have one sign, so nothing cancels."""

    less_LBHS: Tensor
    """What is taken from a query's logits: its log-sum-exp, if that is known, less the gates from
    its node's left edge to it, its own included."""
    after_LBHS: Tensor
    """Gates behind a key, to its node's right edge."""


@triton.jit(do_not_specialize=("T", "S", "H"))
def sums_kernel(
    gate_BTH, tokens_4BHS, blocks_BHN, T, S, H, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of a tile of one head."""
    BLOCKS: tl.constexpr = C // BLOCK
    bh = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * C
    block_N, column = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    t_NB = first + block_N[:, None] * BLOCK + column[None, :]
    gate = gate_BTH + bh // H * T * H + bh % H
    gate_NB = tl.maximum(tl.load(gate + t_NB * H, t_NB < T, 0.0), LEAST) * LOG2_E
    # Of the next token: what is behind the block's last is not of it.
    inside = (t_NB + 1 < T) & (column < BLOCK - 1)[None, :]
    next_NB = tl.maximum(tl.load(gate + (t_NB + 1) * H, inside, 0.0), LEAST) * LOG2_E
    until_NB, behind_NB = tl.cumsum(gate_NB, 1), tl.cumsum(next_NB, 1, reverse=True)
    total_N = tl.sum(gate_NB, 1)
    earlier_NN = block_N[None, :] < block_N[:, None]
    before_N = tl.sum(tl.where(earlier_NN, total_N[None, :], 0.0), 1)
    after_N = tl.sum(tl.where(block_N[None, :] > block_N[:, None], total_N[None, :], 0.0), 1)
    plane = tl.num_programs(1) * S.to(tl.int64)
    out = tokens_4BHS + bh * S + t_NB
    tl.store(out, before_N[:, None] + until_NB)
    tl.store(out + plane, behind_NB + after_N[:, None])
    tl.store(out + 2 * plane, until_NB)
    tl.store(out + 3 * plane, behind_NB)
    tl.store(blocks_BHN + bh * (S // BLOCK) + first // BLOCK + block_N, total_N)


@triton.jit(do_not_specialize=("N",))
def before_kernel(blocks_BHN, before_BHN, N, CHUNK: tl.constexpr):
    """Of all blocks before each of one head; fp64, so that differences are those blocks' sums."""
    head = tl.program_id(0).to(tl.int64) * N
    before = tl.full([], 0.0, tl.float64)
    for first in range(0, N, CHUNK):
        n_C = first + tl.arange(0, CHUNK)
        block_C = tl.load(blocks_BHN + head + n_C, n_C < N, 0.0).to(tl.float64)
        tl.store(before_BHN + head + n_C, before + tl.cumsum(block_C, 0) - block_C, n_C < N)
        before += tl.sum(block_C, 0)


@triton.jit(do_not_specialize=("S", "tiles", "levels"))
def edge_kernel(
    tokens_4BHS, before_BHN, lse_BHS, less_LBHS, after_LBHS, S, tiles, levels,
    C: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Of a tile of one head. Behind the last node there is no edge, and what is written is not
    read."""
    a, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    plane = tl.num_programs(1) * S.to(tl.int64)
    place_C = bh * S + a * C + tl.arange(0, C)
    less_C = -tl.load(tokens_4BHS + place_C)
    after_C = tl.load(tokens_4BHS + plane + place_C)
    if LSE:
        less_C += tl.load(lse_BHS + place_C) * LOG2_E
    before = before_BHN + bh * (S // BLOCK)
    own = tl.load(before + a * (C // BLOCK))
    behind = tl.load(before + tl.minimum(a + 1, tiles - 1) * (C // BLOCK))
    for level in range(levels):
        left = (a >> level) << level
        right = tl.minimum(left + (1 << level), tiles - 1)
        to_left = own - tl.load(before + left * (C // BLOCK))
        to_right = tl.load(before + right * (C // BLOCK)) - behind
        tl.store(less_LBHS + level * plane + place_C, less_C - to_left.to(tl.float32))
        tl.store(after_LBHS + level * plane + place_C, after_C + to_right.to(tl.float32))


@triton.jit
def join(sum_a, ends_a, sum_b, ends_b):
    """Of a range of tokens and one before it: a document's sum, and whether one ends there."""
    return sum_b + tl.where(ends_b > 0, 0.0, sum_a), ends_a | ends_b


@triton.jit(do_not_specialize=("T", "S", "H", "parts"))
def gate_gradient_kernel(
    rows_BHS, columns_PBHS, start_S, end_S, dgate_BTH, T, S, H, parts,
    CHUNK: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """From what each token's row has more than its column: the gate of token l is in the logits of
    i >= l and j < l, and pairs with both i, j >= l are in as many rows as columns. One head, from
    its last tokens on; fp64, because it is a running difference."""
    bh = tl.program_id(0).to(tl.int64)
    plane = tl.num_programs(0) * S.to(tl.int64)
    behind = tl.full([], 0.0, tl.float64)
    for i in range(tl.cdiv(T, CHUNK)):
        column = tl.arange(0, CHUNK)
        t_C = (tl.cdiv(T, CHUNK) - 1 - i) * CHUNK + column
        inside_C = t_C < T
        columns_C = tl.zeros([CHUNK], tl.float32)
        for p in range(parts):
            columns_C += tl.load(columns_PBHS + p * plane + bh * S + t_C, inside_C, 0.0)
        ds_C = tl.load(rows_BHS + bh * S + t_C, inside_C, 0.0) - columns_C
        if DOCUMENTS:
            ends_C = (tl.load(end_S + t_C, inside_C, 0) == t_C + 1).to(tl.int32)
            sum_C, ends_C = tl.associative_scan(
                (ds_C.to(tl.float64), ends_C), 0, join, reverse=True
            )
            sum_C += tl.where(ends_C > 0, 0.0, behind)
            start_C = tl.load(start_S + t_C, inside_C, 0)
        else:
            sum_C = tl.cumsum(ds_C.to(tl.float64), 0, reverse=True) + behind
            start_C = 0 * t_C
        behind = tl.sum(tl.where(column == 0, sum_C, 0.0), 0)
        dgate = dgate_BTH + (bh // H * T + t_C) * H + bh % H
        tl.store(dgate, tl.where(t_C == start_C, 0.0, sum_C).to(tl.float32), inside_C)


launch_sums, launch_gradient = Launched(sums_kernel), Launched(gate_gradient_kernel)
launch_before, launch_edges = Launched(before_kernel), Launched(edge_kernel)


def gate_sums(log_forget_BTH: Tensor, S: int, C: int, block: int) -> GateSums:
    """Of fp32 log gates, for S tokens in tiles of C and blocks."""
    B, T, H = log_forget_BTH.shape
    tokens_4BHS = log_forget_BTH.new_empty(4, B, H, S)
    blocks_BHN = log_forget_BTH.new_empty(B, H, S // block)
    launch_sums(
        (S // C, B * H),
        *(log_forget_BTH, tokens_4BHS, blocks_BHN, T, S, H),
        C=C,
        BLOCK=block,
        num_warps=1,
    )
    return GateSums(tokens_4BHS, blocks_BHN)


def edge_sums(gates: GateSums, lse_BHS: Tensor | None, C: int, levels: int) -> EdgeSums:
    """Of a tree of so many levels over tiles of C tokens, but of one level at least, which is of
    tiles alone."""
    _, B, H, S = gates.tokens_4BHS.shape
    N = gates.blocks_BHN.shape[2]
    before_BHN = torch.empty_like(gates.blocks_BHN, dtype=torch.float64)
    launch_before((B * H,), gates.blocks_BHN, before_BHN, N, CHUNK=CHUNK, num_warps=4)
    levels = max(1, levels)
    edges = EdgeSums(*(gates.tokens_4BHS.new_empty(levels, B, H, S) for _ in range(2)))
    launch_edges(
        (S // C, B * H),
        *(gates.tokens_4BHS, before_BHN, lse_BHS, *vars(edges).values(), S, S // C, levels),
        C=C,
        BLOCK=S // N,
        LSE=lse_BHS is not None,
        num_warps=1,
    )
    return edges


def gate_gradient(
    rows_BHS: Tensor, columns_PBHS: Tensor, T: int, start_S: Tensor | None, end_S: Tensor | None
) -> Tensor:
    """[B, T, H] fp32, from the sums of ds over rows and, in parts, over columns."""
    parts, B, H, S = columns_PBHS.shape
    dgate_BTH = rows_BHS.new_empty(B, T, H)
    launch_gradient(
        (B * H,),
        *(rows_BHS, columns_PBHS, start_S, end_S, dgate_BTH, T, S, H, parts),
        CHUNK=CHUNK,
        DOCUMENTS=start_S is not None,
        num_warps=4,
    )
    return dgate_BTH
