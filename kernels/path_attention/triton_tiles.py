"""The UT transform of every tile on a GPU, and its gradient: what blocks.py does in torch.

With A = tril(W W^T diag(beta), -1), L = (I + A)^-1, U = diag(beta) L and B = tril(W K^T, -1), all
inside a document:

    X = U B,  Y = U W,  M = tril(Q W^T)
    logits inside Q K^T - M X,  q to the left edge Q - M Y
    k to the right edge K - X^T W,  P = I - W^T Y

P is multiplied by others hundreds of times: W W^T, Y and P are products of operands in two bf16
parts, P is kept in two fp16 parts. What is bounded by |q|, |k| or 2 enters products in fp16, which
has 8 times bf16's precision; gradients are in bf16.
"""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import INTERPRETED, tile

TWO_PARTS = tl.constexpr("ieee" if INTERPRETED else "bf16x3")
"""Of fp32 operands in two bf16 parts each, three products."""


@triton.jit
def inverse(A_CC, C: tl.constexpr):
    """(I + A)^-1 for a strictly lower triangular A [C, C] fp32, C of 16, 32 or 64.

    The inverse of twice as large diagonal blocks follows from that of the smaller ones, up to 16
    rows each by itself (as in triton_tools).
    """
    blocks: tl.constexpr = C // 16
    block = tl.arange(0, blocks)
    row_16 = tl.arange(0, 16)
    own = block[:, None, None, None] == block[None, None, :, None]
    A_x16x16 = tl.sum(tl.where(own, tl.reshape(A_CC, (blocks, 16, blocks, 16)), 0.0), 2)
    X_x16x16 = (row_16[:, None] == row_16[None, :]).to(tl.float32)[None, :, :]
    X_x16x16 = X_x16x16 - tl.where(below(row_16, 1)[None, :, :], A_x16x16, 0.0)
    for half in tl.static_range(1, 4):
        O_x16x16 = tl.where(below(row_16, 2**half)[None, :, :], A_x16x16, 0.0)
        product = tl.dot(X_x16x16, O_x16x16, input_precision="tf32")
        X_x16x16 = X_x16x16 - tl.dot(product, X_x16x16, input_precision="tf32")
    X_CC = tl.reshape(tl.where(own, X_x16x16[:, :, None, :], 0.0), (C, C))
    row_C = tl.arange(0, C)
    for half in tl.static_range(4, 6):
        if 2**half < C:
            O_CC = tl.where(below(row_C, 2**half), A_CC, 0.0)
            product = tl.dot(X_CC, O_CC, input_precision="tf32")
            X_CC = X_CC - tl.dot(product, X_CC, input_precision="tf32")
    return X_CC


@triton.jit
def below(row, half: tl.constexpr):
    """Where a block of 2 half rows has its second half's rows and its first half's columns."""
    pair = (row // (2 * half))[:, None] == (row // (2 * half))[None, :]
    return pair & ((row // half)[:, None] > (row // half)[None, :])


@triton.jit
def pairs(start_S, first, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """[C, C]: the row's token is the column's or a later one of its document."""
    row_C = tl.arange(0, C)
    upto_CC = row_C[:, None] >= row_C[None, :]
    if DOCUMENTS:
        start_C = tl.load(start_S + first + row_C)
        upto_CC = upto_CC & ((first + row_C)[None, :] >= start_C[:, None])
    return upto_CC


@triton.jit
def gram(w_row, w_column, beta_column, start_row, first_row, first_column, C: tl.constexpr):
    """Rows of A: [C, C] of C later (or the same) and C earlier tokens."""
    row_C = tl.arange(0, C)
    A_CC = tl.dot(w_row, tl.trans(w_column), input_precision=TWO_PARTS) * beta_column[None, :]
    column_1C = (first_column + row_C)[None, :]
    seen_CC = (column_1C < (first_row + row_C)[:, None]) & (column_1C >= start_row[:, None])
    return tl.where(seen_CC, A_CC, 0.0)


VARYING = ("T", "heads", "H", "groups", "G")
"""Of which no value is worth a compilation of its own. Inputs and their gradients have `heads`
query or `groups` key/value heads a row, of which H and G are taken; R = H / G."""


@triton.jit(do_not_specialize=VARYING)
def inverse_kernel(
    w, beta, start_S, L, T, S, groups, G,
    K: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """L of a tile, from those of its halves: [[L_1, 0], [-L_2 A_21 L_1, L_2]]."""
    HALF: tl.constexpr = C // 2
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_H, key_K = tl.arange(0, HALF), tl.arange(0, K)
    t1_H = n * C + row_H
    t2_H = t1_H + HALF
    first, own = b * T + n * C, bg * S + n * C
    w += g * K
    beta += b * T * groups + g
    w1_tile = tile(w, first, groups * K, row_H, key_K)
    w2_tile = tile(w, first + HALF, groups * K, row_H, key_K)
    inside1_H1, inside2_H1 = (t1_H < T)[:, None], (t2_H < T)[:, None]
    beta1_H = tl.load(beta + t1_H * groups, t1_H < T, 0.0)
    beta2_H = tl.load(beta + t2_H * groups, t2_H < T, 0.0)
    start1_H, start2_H = 0 * t1_H, 0 * t2_H
    if DOCUMENTS:
        start1_H, start2_H = tl.load(start_S + t1_H), tl.load(start_S + t2_H)
    middle = n * C + HALF
    w1_HK = tl.load(w1_tile, inside1_H1, 0.0)
    L1_HH = inverse(gram(w1_HK, w1_HK, beta1_H, start1_H, n * C, n * C, HALF), HALF)
    tl.store(tile(L, own, C, row_H, row_H), L1_HH)
    tl.store(tile(L + HALF, own, C, row_H, row_H), tl.zeros([HALF, HALF], tl.float32))
    w2_HK = tl.load(w2_tile, inside2_H1, 0.0)
    L2_HH = inverse(gram(w2_HK, w2_HK, beta2_H, start2_H, middle, middle, HALF), HALF)
    tl.store(tile(L + HALF, own + HALF, C, row_H, row_H), L2_HH)
    # Read once more, rather than held all along.
    w1_HK, w2_HK = tl.load(w1_tile, inside1_H1, 0.0), tl.load(w2_tile, inside2_H1, 0.0)
    A_HH = gram(w2_HK, w1_HK, beta1_H, start2_H, middle, n * C, HALF)
    A_HH = tl.dot(L2_HH, A_HH, input_precision="tf32")
    A_HH = -tl.dot(A_HH, L1_HH, input_precision="tf32")
    tl.store(tile(L, own + HALF, C, row_H, row_H), A_HH)


@triton.jit(do_not_specialize=VARYING)
def solve_kernel(
    k, w, beta, start_S, L, XT, Y, k_carried, k_exact, maps, maps_rest,
    T, S, groups, G,
    K: tl.constexpr, C: tl.constexpr, FINE: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """X^T, Y and P of a tile, and its keys carried to the right edge (twice: as attention reads
    them, and for another product)."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first, own = b * T + n * C, bg * S + n * C
    start_C = 0 * t_C
    if DOCUMENTS:
        start_C = tl.load(start_S + t_C)
    later_CC = (t_C[:, None] < t_C[None, :]) & (t_C[:, None] >= start_C[None, :])
    w_tile, L_tile = tile(w + g * K, first, groups * K, row_C, key_K), tile(L, own, C, row_C, row_C)
    beta_C = tl.load(beta + (b * T + t_C) * groups + g, t_C < T, 0.0)
    w_CK = tl.load(w_tile, inside_C1, 0.0).to(FINE)
    k_CK = tl.load(tile(k + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0)
    BT_CC = tl.where(later_CC, tl.dot(k_CK.to(FINE), tl.trans(w_CK)), 0.0).to(FINE)
    U_CC = (tl.load(L_tile) * beta_C[:, None]).to(FINE)
    XT_CC = tl.dot(BT_CC, tl.trans(U_CC)).to(FINE)
    tl.store(tile(XT, own, C, row_C, row_C), XT_CC)
    k_CK = k_CK.to(tl.float32) - tl.dot(XT_CC, w_CK)
    tl.store(tile(k_carried, own, K, row_C, key_K), k_CK.to(k_carried.dtype.element_ty))
    tl.store(tile(k_exact, own, K, row_C, key_K), k_CK.to(FINE))
    # Read once more, rather than held in fp32 all along.
    w_CK = tl.load(w_tile, inside_C1, 0.0)
    Y_CK = tl.dot(tl.load(L_tile) * beta_C[:, None], w_CK, input_precision=TWO_PARTS)
    tl.store(tile(Y, own, K, row_C, key_K), Y_CK.to(FINE))
    map_KK = tl.where(key_K[:, None] == key_K[None, :], 1.0, 0.0)
    map_KK -= tl.dot(tl.trans(w_CK), Y_CK, input_precision=TWO_PARTS)
    map_row = (bg * (S // C) + n) * K
    tl.store(tile(maps, map_row, K, key_K, key_K), map_KK.to(FINE))
    rest_KK = map_KK - map_KK.to(FINE).to(tl.float32)
    tl.store(tile(maps_rest, map_row, K, key_K, key_K), rest_KK.to(FINE))


@triton.jit
def gathered(
    acc_CE, left, right, bg, n, T, S, heads, H,
    R: tl.constexpr, C: tl.constexpr, E: tl.constexpr, LOW: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """acc_CE and left^T right of a tile, of each query head that shares a key/value head. left is
    [B, H, S, C], right [B, H, S, E], or [B, T, H, E] where NATURAL."""
    b, g = bg // (H // R), bg % (H // R)
    row_C, column_E = tl.arange(0, C), tl.arange(0, E)
    inside_C1 = (n * C + row_C < T)[:, None]
    for r in range(R):
        h = g * R + r
        left_CC = tl.load(tile(left, (b * H + h) * S + n * C, C, row_C, row_C))
        if NATURAL:
            right_tile = tile(right + h * E, b * T + n * C, heads * E, row_C, column_E)
            right_CE = tl.load(right_tile, inside_C1, 0.0).to(LOW)
        else:
            right_CE = tl.load(tile(right, (b * H + h) * S + n * C, E, row_C, column_E))
        acc_CE = tl.dot(tl.trans(left_CC), right_CE, acc_CE)
    return acc_CE


@triton.jit(do_not_specialize=VARYING)
def key_gradient_kernel(
    q, k, w, beta, start_S, L, M, dq_carried, dlogits, dk_carried, dmaps, dX, dY, dB, dk,
    scale, T, S, heads, H,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile's dk, dX, dB and dY."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    G, groups = H // R, heads // R
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first, own = b * T + n * C, bg * S + n * C
    below_CC = pairs(start_S, n * C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    w_CK = tl.load(tile(w + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    dY_CK = gathered(
        tl.zeros([C, K], tl.float32), M, dq_carried, bg, n, T, S, heads, H, R, C, K, LOW, False
    )
    dP_KK = tl.load(tile(dmaps, (bg * (S // C) + n) * K, K, key_K, key_K))
    dY_CK = tl.dot(w_CK, dP_KK, dY_CK)
    tl.store(tile(dY, own, K, row_C, key_K), (-dY_CK).to(LOW))
    dkc_tile = tile(dk_carried, own, K, row_C, key_K)
    dX_CC = gathered(
        tl.zeros([C, C], tl.float32), M, dlogits, bg, n, T, S, heads, H, R, C, C, LOW, False
    )
    dX_CC = tl.dot(w_CK, tl.trans(tl.load(dkc_tile).to(LOW)), dX_CC)
    dX_CC = (-dX_CC).to(LOW)
    tl.store(tile(dX, own, C, row_C, row_C), dX_CC)
    beta_C = tl.load(beta + (b * T + t_C) * groups + g, t_C < T, 0.0)
    U_CC = (tl.load(tile(L, own, C, row_C, row_C)) * beta_C[:, None]).to(LOW)
    dB_CC = tl.where(below_CC, tl.dot(tl.trans(U_CC), dX_CC), 0.0).to(LOW)
    tl.store(tile(dB, own, C, row_C, row_C), dB_CC)
    dk_CK = gathered(
        tl.zeros([C, K], tl.float32), dlogits, q, bg, n, T, S, heads, H, R, C, K, LOW, True
    )
    dk_CK = tl.dot(tl.trans(dB_CC), w_CK, dk_CK * scale + tl.load(dkc_tile))
    dk_tile = tile(dk + g * K, first, groups * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk.dtype.element_ty), inside_C1)


@triton.jit(do_not_specialize=VARYING)
def inverse_gradient_kernel(
    k, w, beta, start_S, L, dX, dY, dA, dbeta, T, S, groups, G,
    K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile's dA, and of dbeta what passes through U."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first, own = b * T + n * C, bg * S + n * C
    below_CC = pairs(start_S, n * C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    w_CK = tl.load(tile(w + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    k_CK = tl.load(tile(k + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    B_CC = tl.where(below_CC, tl.dot(w_CK, tl.trans(k_CK)), 0.0).to(LOW)
    dU_CC = tl.dot(tl.load(tile(dX, own, C, row_C, row_C)), tl.trans(B_CC))
    dU_CC = tl.dot(tl.load(tile(dY, own, K, row_C, key_K)), tl.trans(w_CK), dU_CC)
    L_CC = tl.load(tile(L, own, C, row_C, row_C)).to(LOW)
    beta_C = tl.load(beta + (b * T + t_C) * groups + g, t_C < T, 0.0)
    dbeta_C = tl.sum(dU_CC * L_CC.to(tl.float32), 1)
    # Of L = (I + A)^-1: dA = -L^T dL L^T.
    dA_CC = tl.dot(tl.trans(L_CC), (dU_CC * beta_C[:, None]).to(LOW)).to(LOW)
    dA_CC = tl.where(below_CC, -tl.dot(dA_CC, tl.trans(L_CC)), 0.0)
    tl.store(tile(dA, own, C, row_C, row_C), dA_CC.to(LOW))
    tl.store(dbeta + (b * T + t_C) * groups + g, dbeta_C, t_C < T)


@triton.jit(do_not_specialize=VARYING)
def map_row_gradient_kernel(
    q, k, w, beta, L, XT, Y, dM, dk_carried, dmaps, dY, dB, dA, dw, dbeta,
    T, S, heads, H,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """A tile's dw, and the rest of dbeta."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    G, groups = H // R, heads // R
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first, own = b * T + n * C, bg * S + n * C
    w_CK = tl.load(tile(w + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    dA_CC = tl.load(tile(dA, own, C, row_C, row_C))
    beta_C = tl.load(beta + (b * T + t_C) * groups + g, t_C < T, 0.0)
    # A = tril(W W^T diag(beta)): what comes to beta_b w_b, of which both have a share.
    dw_CK = tl.dot(tl.trans(dA_CC), w_CK)
    dbeta_tile = dbeta + (b * T + t_C) * groups + g
    dbeta_C = tl.load(dbeta_tile, t_C < T, 0.0) + tl.sum(dw_CK * w_CK.to(tl.float32), 1)
    tl.store(dbeta_tile, dbeta_C, t_C < T)
    dw_CK = tl.dot((dA_CC.to(tl.float32) * beta_C[None, :]).to(LOW), w_CK, dw_CK * beta_C[:, None])
    dw_CK = gathered(dw_CK, dM, q, bg, n, T, S, heads, H, R, C, K, LOW, True)
    k_CK = tl.load(tile(k + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    dw_CK = tl.dot(tl.load(tile(dB, own, C, row_C, row_C)), k_CK, dw_CK)
    U_CC = (tl.load(tile(L, own, C, row_C, row_C)) * beta_C[:, None]).to(LOW)
    dw_CK = tl.dot(tl.trans(U_CC), tl.load(tile(dY, own, K, row_C, key_K)), dw_CK)
    XT_CC = (-tl.load(tile(XT, own, C, row_C, row_C))).to(LOW)
    dkc_CK = tl.load(tile(dk_carried, own, K, row_C, key_K)).to(LOW)
    dw_CK = tl.dot(tl.trans(XT_CC), dkc_CK, dw_CK)
    Y_CK = (-tl.load(tile(Y, own, K, row_C, key_K))).to(LOW)
    dP_KK = tl.load(tile(dmaps, (bg * (S // C) + n) * K, K, key_K, key_K))
    dw_CK = tl.dot(Y_CK, tl.trans(dP_KK), dw_CK)
    tl.store(tile(dw + g * K, first, groups * K, row_C, key_K), dw_CK, inside_C1)
