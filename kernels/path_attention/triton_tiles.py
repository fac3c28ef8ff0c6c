"""The UT transform of every tile on a GPU: what blocks.py does in torch.

With A = tril(W W^T diag(beta), -1), L = (I + A)^-1 and B = tril(W K^T, -1), all inside a document,
X = L B, Y = L W and M = tril(Q W^T) diag(beta):

    logits inside Q K^T - M X,  q to the left edge Q - M Y
    k to the right edge K - X^T diag(beta) W,  P = I - W^T diag(beta) Y

X and Y are kept before beta is put to them: the gradient needs them so, and beta may be 0. All
operands of products are fp16, which has 8 times bf16's precision: |q|, |k| or 2 bound them. So W is
rounded to fp16 too, once, before anything is made of it.
"""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile


@triton.jit
def inverse(A_CC, C: tl.constexpr, FINE: tl.constexpr):
    """(I + A)^-1 for a strictly lower triangular A [C, C], C of 16, 32 or 64, in fp32.

    The inverse of twice as large diagonal blocks follows from that of the smaller ones:
    (D + O)^-1 = D^-1 - D^-1 O D^-1 for a block diagonal D and what lies below it.
    """
    row_C = tl.arange(0, C)
    # The highest bit in which two rows differ says in which level they part.
    apart_CC = row_C[:, None] ^ row_C[None, :]
    X_CC = tl.where(apart_CC == 0, 1.0, tl.where(apart_CC == 1, -A_CC.to(tl.float32), 0.0))
    for level in tl.static_range(1, 6):
        if 2**level < C:
            O_CC = tl.where((apart_CC >> level) == 1, A_CC, 0.0).to(FINE)
            D_CC = X_CC.to(FINE)
            X_CC -= tl.dot(tl.dot(D_CC, O_CC).to(FINE), D_CC)
    return X_CC


TOGETHER = tl.constexpr(8)
"""Heads whose programs run at the same time: their keys and values fit an H100's second cache at
8,192 tokens."""


@triton.jit
def longest_first():
    """Of a grid (tiles, heads): which tile, counted from that of most work, and which head (int64)
    a program takes. The long ones of several heads come before their short ones, so that no
    multiprocessor ends late, but not before those of too many heads, which would share no keys."""
    tiles, heads = tl.num_programs(0), tl.num_programs(1)
    turn = tl.program_id(1) * tiles + tl.program_id(0)
    first = turn // (tiles * TOGETHER) * TOGETHER
    together = tl.minimum(heads - first, TOGETHER)
    turn -= first * tiles
    return turn // together, (first + turn % together).to(tl.int64)


@triton.jit
def part(ROWS: tl.constexpr, C: tl.constexpr):
    """The tile of a program that owns ROWS of its rows, and these."""
    parts: tl.constexpr = C // ROWS
    return tl.program_id(0) // parts, tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)


@triton.jit
def lower(row, column, C: tl.constexpr):
    """[rows, columns]: which entries of a lower triangle C x C are in memory: all but its upper
    right quarter."""
    return (row >= C // 2)[:, None] | (column < C // 2)[None, :]


@triton.jit
def upper(row, column, C: tl.constexpr):
    """The same of an upper triangle."""
    return (row < C // 2)[:, None] | (column >= C // 2)[None, :]


@triton.jit
def upto(start_S, first, row_R, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """[rows, C]: the row's token is the column's or a later one of its document."""
    row_C = tl.arange(0, C)
    upto_RC = row_R[:, None] >= row_C[None, :]
    if DOCUMENTS:
        start_R = tl.load(start_S + first + row_R)
        upto_RC = upto_RC & ((first + row_C)[None, :] >= start_R[:, None])
    return upto_RC


@triton.jit
def before(start_S, first, row_R, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """[rows, C]: the row's token is an earlier one than the column's, of its document."""
    row_C = tl.arange(0, C)
    before_RC = row_R[:, None] < row_C[None, :]
    if DOCUMENTS:
        start_C = tl.load(start_S + first + row_C)
        before_RC = before_RC & ((first + row_R)[:, None] >= start_C[None, :])
    return before_RC


@triton.jit
def gram(w_row, w_column, beta_column, start_row, first_row, first_column, C: tl.constexpr):
    """Rows of A: [C, C] of C later (or the same) and C earlier tokens."""
    row_C = tl.arange(0, C)
    A_CC = tl.dot(w_row, tl.trans(w_column)) * beta_column[None, :]
    column_1C = (first_column + row_C)[None, :]
    seen_CC = (column_1C < (first_row + row_C)[:, None]) & (column_1C >= start_row[:, None])
    return tl.where(seen_CC, A_CC, 0.0)


VARYING = ("T", "heads", "H", "groups", "G", "nodes")
"""Of which no value is worth a compilation of its own. Inputs and their gradients have `heads`
query or `groups` key/value heads a row, of which H and G are taken; R = H / G."""


@triton.jit(do_not_specialize=VARYING)
def inverse_kernel(
    w, beta, start_S, w_fine, beta_own, L, T, S, G,
    K: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """L of a tile, from those of its halves: [[L_1, 0], [-L_2 A_21 L_1, L_2]]. w and beta for the
    kernels that follow, with zeros behind the last token."""
    HALF: tl.constexpr = C // 2
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_H, key_K = tl.arange(0, HALF), tl.arange(0, K)
    t1_H = n * C + row_H
    t2_H = t1_H + HALF
    first, own = b * T + n * C, bg * S + n * C
    middle = n * C + HALF
    w += g * K
    beta += b * T * G + g
    beta1_H = tl.load(beta + t1_H * G, t1_H < T, 0.0)
    beta2_H = tl.load(beta + t2_H * G, t2_H < T, 0.0)
    tl.store(beta_own + own + row_H, beta1_H)
    tl.store(beta_own + own + HALF + row_H, beta2_H)
    start1_H, start2_H = 0 * t1_H, 0 * t2_H
    if DOCUMENTS:
        start1_H, start2_H = tl.load(start_S + t1_H), tl.load(start_S + t2_H)
    w1_HK = tl.load(tile(w, first, G * K, row_H, key_K), (t1_H < T)[:, None], 0.0).to(FINE)
    tl.store(tile(w_fine, own, K, row_H, key_K), w1_HK)
    w2_tile = tile(w, first + HALF, G * K, row_H, key_K)
    w2_HK = tl.load(w2_tile, (t2_H < T)[:, None], 0.0).to(FINE)
    tl.store(tile(w_fine, own + HALF, K, row_H, key_K), w2_HK)
    A1_HH = gram(w1_HK, w1_HK, beta1_H, start1_H, n * C, n * C, HALF).to(FINE)
    A21_HH = gram(w2_HK, w1_HK, beta1_H, start2_H, middle, n * C, HALF).to(FINE)
    A2_HH = gram(w2_HK, w2_HK, beta2_H, start2_H, middle, middle, HALF).to(FINE)
    L1_HH = inverse(A1_HH, HALF, FINE).to(FINE)
    tl.store(tile(L, own, C, row_H, row_H), L1_HH)
    A21_HH = tl.dot(A21_HH, L1_HH).to(FINE)
    L2_HH = inverse(A2_HH, HALF, FINE).to(FINE)
    tl.store(tile(L + HALF, own + HALF, C, row_H, row_H), L2_HH)
    tl.store(tile(L, own + HALF, C, row_H, row_H), (-tl.dot(L2_HH, A21_HH)).to(FINE))


@triton.jit(do_not_specialize=("nodes",))
def map_kernel(
    w, beta, L, Y, maps, S, nodes,
    K: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Columns of a tile's Y and P."""
    parts: tl.constexpr = K // COLUMNS
    n = tl.program_id(0) // parts
    column_E = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    bg = tl.program_id(1).to(tl.int64)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    own = bg * S + n * C
    w_CE = tl.load(tile(w, own, K, row_C, column_E))
    L_CC = tl.load(tile(L, own, C, row_C, row_C), lower(row_C, row_C, C), 0.0)
    Y_CE = tl.dot(L_CC, w_CE)
    tl.store(tile(Y, own, K, row_C, column_E), Y_CE.to(FINE))
    Y_CE = (Y_CE * -tl.load(beta + own + row_C)[:, None]).to(FINE)
    w_CK = tl.load(tile(w, own, K, row_C, key_K))
    map_KE = tl.where(key_K[:, None] == column_E[None, :], 1.0, 0.0)
    map_KE = tl.dot(tl.trans(w_CK), Y_CE, map_KE)
    tl.store(tile(maps, (bg * nodes + n) * K, K, key_K, column_E), map_KE.to(FINE))
