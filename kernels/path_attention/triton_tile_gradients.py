"""The gradient of triton_tiles.py, in bf16 products, from that of the logits inside tiles, of the
keys at their tiles' right edges and of the maps. As written there, X = L B and Y = L W are before
beta; with dX and dY the gradients behind beta, and Z and V those of what L multiplies:

    dX = -(M^T dlogits + W dk_carried^T),  Z = L^T diag(beta) dX,  dB = tril(Z, -1)
    dY = -(M^T dq_carried + W dP),         V = L^T diag(beta) dY
    dA = -tril(Z X^T + V Y^T, -1)          because dL = -L dA L
    dbeta = rowsum(dX X + dY Y + W dA^T W)
"""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.path_attention.triton_tiles import (
    VARYING,
    before,
    lower,
    upper,
    upto,
)
from mixtron.kernels.triton_tools import tile


@triton.jit
def query_gradient(
    dv_CK, k, w, beta, start_S, XT, Y, dlogits, dq, dM, scale, a, bh, T, S, heads, H,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile's dq, and -dM, whose M is before beta, from the gradient of its queries at its left
    edge and that of its logits, which the same program has written."""
    b, h = bh // H, bh % H
    g, G, groups = h // R, H // R, heads // R
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    inside_C1 = (a * C + row_C < T)[:, None]
    first, own, shared = b * T + a * C, bh * S + a * C, (b * G + g) * S + a * C
    below_CC = lower(row_C, row_C, C)
    tl.debug_barrier()
    dlogits_CC = tl.load(tile(dlogits, own, C, row_C, row_C), below_CC, 0.0)
    XT_CC = tl.load(tile(XT, shared, C, row_C, row_C), upper(row_C, row_C, C), 0.0)
    dM_CC = tl.dot(dlogits_CC, XT_CC.to(LOW))
    Y_CK = tl.load(tile(Y, shared, K, row_C, key_K)).to(LOW)
    dM_CC = tl.dot(dv_CK.to(LOW), tl.trans(Y_CK), dM_CC)
    dM_CC = tl.where(upto(start_S, a * C, row_C, C, DOCUMENTS), dM_CC * scale, 0.0)
    tl.store(tile(dM, own, C, row_C, row_C), dM_CC.to(LOW), below_CC)
    k_CK = tl.load(tile(k + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    dq_CK = tl.dot(dlogits_CC, k_CK, dv_CK) * scale
    dM_CC *= -tl.load(beta + shared + row_C)[None, :]
    w_CK = tl.load(tile(w, shared, K, row_C, key_K)).to(LOW)
    dq_CK = tl.dot(dM_CC.to(LOW), w_CK, dq_CK)
    dq_tile = tile(dq + h * K, first, heads * K, row_C, key_K)
    tl.store(dq_tile, dq_CK.to(dq.dtype.element_ty), inside_C1)


@triton.jit
def rows_of(x, n, b, h, T, heads, C: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr):
    """[C, K]: a tile of an input, zeros behind the last token."""
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    pointers = tile(x + h * K, b * T + n * C, heads * K, row_C, key_K)
    return tl.load(pointers, (n * C + row_C < T)[:, None], 0.0).to(LOW)


@triton.jit
def triangle(x, of_head, C: tl.constexpr):
    """[C, C]: a tile of a lower triangle a head."""
    row_C = tl.arange(0, C)
    return tl.load(tile(x, of_head, C, row_C, row_C), lower(row_C, row_C, C), 0.0)


@triton.jit
def scaled_M(q_CK, w_CK, start_S, n, scale, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    M_CC = tl.dot(q_CK, tl.trans(w_CK)) * scale
    M_CC = tl.where(upto(start_S, n * C, tl.arange(0, C), C, DOCUMENTS), M_CC, 0.0)
    return M_CC.to(q_CK.dtype)


@triton.jit(do_not_specialize=VARYING)
def tile_gradient_kernel(
    q, k, w, beta, start_S, L, XT, Y, dlogits, dM, dq_left, dk_right, dmaps, dk, dw, dbeta,
    scale, T, S, heads, H, nodes,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile's dk, dw and dbeta."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    G, groups = H // R, heads // R
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    first, own = b * T + n * C, bg * S + n * C
    w_tile, dk_tile = tile(w, own, K, row_C, key_K), tile(dk_right, own, K, row_C, key_K)
    XT_tile, Y_tile = tile(XT, own, C, row_C, row_C), tile(Y, own, K, row_C, key_K)
    dP_tile = tile(dmaps, (bg * nodes + n) * K, K, key_K, key_K)
    beta_C = tl.load(beta + own + row_C)
    above_CC = upper(row_C, row_C, C)

    w_CK = tl.load(w_tile).to(LOW)
    dX_CC = tl.dot(tl.load(dk_tile), tl.trans(w_CK))  # of X^T: a row is a key's
    # The first head's stay at hand, others' are read and made again.
    h, of_head = g * R, (b * H + g * R) * S + n * C
    q_CK = rows_of(q, n, b, h, T, heads, C, K, LOW)
    M_CC = scaled_M(q_CK, w_CK, start_S, n, scale, C, DOCUMENTS)
    dlogits_CC = triangle(dlogits, of_head, C)
    dX_CC = tl.dot(tl.trans(dlogits_CC), M_CC, dX_CC)
    for r in range(1, R):
        next_CK = rows_of(q, n, b, h + r, T, heads, C, K, LOW)
        next_CC = scaled_M(next_CK, w_CK, start_S, n, scale, C, DOCUMENTS)
        dX_CC = tl.dot(tl.trans(triangle(dlogits, of_head + r * S, C)), next_CC, dX_CC)
    Z_CC = tl.dot((dX_CC * -beta_C[None, :]).to(LOW), triangle(L, own, C).to(LOW))
    Z_CC = tl.where(before(start_S, n * C, row_C, C, DOCUMENTS), Z_CC, 0.0).to(LOW)
    dk_CK = tl.dot(Z_CC, w_CK) * (1 / scale)
    dk_CK = tl.dot(tl.trans(dlogits_CC), q_CK, dk_CK)
    for r in range(1, R):
        next_CK = rows_of(q, n, b, h + r, T, heads, C, K, LOW)
        dk_CK = tl.dot(tl.trans(triangle(dlogits, of_head + r * S, C)), next_CK, dk_CK)
    dk_CK = dk_CK * scale + tl.load(dk_tile).to(tl.float32)
    out_tile = tile(dk + g * K, first, groups * K, row_C, key_K)
    inside_C1 = (n * C + row_C < T)[:, None]
    tl.store(out_tile, dk_CK.to(dk.dtype.element_ty), inside_C1)

    dY_CK = tl.dot(tl.load(w_tile).to(LOW), tl.load(dP_tile))
    dq_tile = tile(dq_left, of_head, K, row_C, key_K)
    dY_CK = tl.dot(tl.trans(M_CC), tl.load(dq_tile), dY_CK)
    for r in range(1, R):
        next_CK = rows_of(q, n, b, h + r, T, heads, C, K, LOW)
        next_CC = scaled_M(next_CK, w_CK, start_S, n, scale, C, DOCUMENTS)
        dY_CK = tl.dot(tl.trans(next_CC), tl.load(dq_tile + r * S.to(tl.int64) * K), dY_CK)
    L_CC = triangle(L, own, C).to(LOW)
    dw_CK = tl.dot(tl.trans(L_CC), (dY_CK * -beta_C[:, None]).to(LOW))
    dA_CC = tl.dot(tl.trans(Z_CC), tl.load(XT_tile, above_CC, 0.0).to(LOW))
    dA_CC = tl.dot(dw_CK.to(LOW), tl.trans(tl.load(Y_tile).to(LOW)), dA_CC)
    below_CC = upto(start_S, n * C, row_C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    dA_CC = tl.where(below_CC, -dA_CC, 0.0).to(LOW)
    # Of diag(beta) W, less its sign: all that beta is in.
    du_CK = tl.dot(tl.load(Y_tile).to(LOW), tl.trans(tl.load(dP_tile)))
    du_CK = tl.dot(tl.trans(tl.load(XT_tile, above_CC, 0.0).to(LOW)), tl.load(dk_tile), du_CK)
    du_CK = tl.dot(tl.trans(-dA_CC), w_CK, du_CK)
    for r in range(R):
        next_CK = rows_of(q, n, b, h + r, T, heads, C, K, LOW)
        du_CK = tl.dot(tl.trans(triangle(dM, of_head + r * S, C)), next_CK, du_CK)
    dbeta_C = -tl.sum(du_CK * tl.load(w_tile).to(tl.float32), 1)
    tl.store(dbeta + (first + row_C) * groups + g, dbeta_C, n * C + row_C < T)
    dw_CK -= beta_C[:, None] * du_CK
    weighed_CK = (tl.load(w_tile).to(tl.float32) * beta_C[:, None]).to(LOW)
    dw_CK = tl.dot(dA_CC, weighed_CK, dw_CK)
    dw_CK = tl.dot(tl.trans(Z_CC), rows_of(k, n, b, g, T, groups, C, K, LOW), dw_CK)
    tl.store(tile(dw + g * K, first, groups * K, row_C, key_K), dw_CK, inside_C1)
