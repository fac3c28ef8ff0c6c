"""The gradient of triton_tiles.py, in bf16 products, from that of the logits inside tiles, of the
keys at their tiles' right edges and of the maps. As written there, X = L B and Y = L W are before
beta; with dX and dY the gradients behind beta, and Z and V those of what L multiplies:

    dX = -(M^T dlogits + W dk_carried^T),  Z = L^T diag(beta) dX,  dB = tril(Z, -1)
    dY = -(M^T dq_carried + W dP),         V = L^T diag(beta) dY
    dA = -tril(Z X^T + V Y^T, -1)          because dL = -L dA L
    dbeta = rowsum(dX X + dY Y + W dA^T W)
"""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from mixtron.kernels.path_attention.triton_tiles import VARYING, pairs
from mixtron.kernels.triton_tools import tile


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
    q, w, beta, start_S, L, XT, M, dlogits, dk_carried, ZT, dk, dbeta_own,
    scale, T, S, heads, H,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile's dk and Z^T, and of dbeta what passes through X."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    G, groups = H // R, heads // R
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    t_C = n * C + row_C
    own = bg * S + n * C
    w_CK = tl.load(tile(w, own, K, row_C, key_K)).to(LOW)
    dkc_tile = tile(dk_carried, own, K, row_C, key_K)
    dX_CC = tl.dot(tl.load(dkc_tile).to(LOW), tl.trans(w_CK))
    dX_CC = gathered(dX_CC, dlogits, M, bg, n, T, S, heads, H, R, C, C, LOW, False)
    XT_CC = tl.load(tile(XT, own, C, row_C, row_C)).to(tl.float32)
    tl.store(dbeta_own + own + row_C, -tl.sum(dX_CC * XT_CC, 0))
    dX_CC *= -tl.load(beta + own + row_C)[None, :]
    Z_CC = tl.dot(dX_CC.to(LOW), tl.load(tile(L, own, C, row_C, row_C)).to(LOW)).to(LOW)
    tl.store(tile(ZT, own, C, row_C, row_C), Z_CC)
    start_C = 0 * t_C
    if DOCUMENTS:
        start_C = tl.load(start_S + t_C)
    later_CC = (t_C[:, None] < t_C[None, :]) & (t_C[:, None] >= start_C[None, :])
    dk_CK = tl.dot(tl.where(later_CC, Z_CC, 0.0).to(LOW), w_CK) * (1 / scale)
    dk_CK = gathered(dk_CK, dlogits, q, bg, n, T, S, heads, H, R, C, K, LOW, True)
    dk_CK = dk_CK * scale + tl.load(dkc_tile)
    dk_tile = tile(dk + g * K, b * T + n * C, groups * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk.dtype.element_ty), (t_C < T)[:, None])


@triton.jit(do_not_specialize=VARYING)
def inverse_gradient_kernel(
    w, beta, start_S, L, XT, Y, M, dq_carried, dmaps, ZT, V, dA, dbeta_own, T, S, heads, H,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile's V and dA, and of dbeta what passes through Y."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    own = bg * S + n * C
    w_CK = tl.load(tile(w, own, K, row_C, key_K)).to(LOW)
    dP_KK = tl.load(tile(dmaps, (bg * (S // C) + n) * K, K, key_K, key_K))
    dY_CK = tl.dot(w_CK, dP_KK)
    dY_CK = gathered(dY_CK, M, dq_carried, bg, n, T, S, heads, H, R, C, K, LOW, False)
    Y_tile = tile(Y, own, K, row_C, key_K)
    dbeta_tile = dbeta_own + own + row_C
    dbeta_C = tl.load(dbeta_tile) - tl.sum(dY_CK * tl.load(Y_tile).to(tl.float32), 1)
    tl.store(dbeta_tile, dbeta_C)
    dY_CK *= -tl.load(beta + own + row_C)[:, None]
    L_CC = tl.load(tile(L, own, C, row_C, row_C)).to(LOW)
    V_CK = tl.dot(tl.trans(L_CC), dY_CK.to(LOW)).to(LOW)
    tl.store(tile(V, own, K, row_C, key_K), V_CK)
    dA_CC = tl.dot(V_CK, tl.trans(tl.load(Y_tile).to(LOW)))
    XT_CC = tl.load(tile(XT, own, C, row_C, row_C)).to(LOW)
    dA_CC = tl.dot(tl.trans(tl.load(tile(ZT, own, C, row_C, row_C))), XT_CC, dA_CC)
    below_CC = pairs(start_S, n * C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    dA_CC = tl.where(below_CC, -dA_CC, 0.0)
    tl.store(tile(dA, own, C, row_C, row_C), dA_CC.to(LOW))


@triton.jit(do_not_specialize=VARYING)
def row_gradient_kernel(
    q, k, w, beta, start_S, XT, Y, dM, dk_carried, dmaps, ZT, V, dA, dbeta_own, dw, dbeta,
    T, S, heads, H,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
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
    w_tile = tile(w, own, K, row_C, key_K)
    w_CK = tl.load(w_tile).to(LOW)
    dA_CC = tl.load(tile(dA, own, C, row_C, row_C))
    # A = tril(W W^T diag(beta)): what comes to beta_b w_b, of which both have a share.
    dw_CK = tl.dot(tl.trans(dA_CC), w_CK)
    dbeta_C = tl.load(dbeta_own + own + row_C) + tl.sum(dw_CK * w_CK.to(tl.float32), 1)
    tl.store(dbeta + (b * T + t_C) * groups + g, dbeta_C, t_C < T)
    dkc_CK = tl.load(tile(dk_carried, own, K, row_C, key_K)).to(LOW)
    XT_CC = tl.load(tile(XT, own, C, row_C, row_C)).to(LOW)
    dw_CK = tl.dot(tl.trans(XT_CC), dkc_CK, -dw_CK)
    dP_KK = tl.load(tile(dmaps, (bg * (S // C) + n) * K, K, key_K, key_K))
    Y_CK = tl.load(tile(Y, own, K, row_C, key_K)).to(LOW)
    dw_CK = tl.dot(Y_CK, tl.trans(dP_KK), dw_CK)
    beta_C = tl.load(beta + own + row_C)
    dw_CK = tl.load(tile(V, own, K, row_C, key_K)).to(tl.float32) - beta_C[:, None] * dw_CK
    dA_CC = (tl.load(tile(dA, own, C, row_C, row_C)).to(tl.float32) * beta_C[None, :]).to(LOW)
    dw_CK = tl.dot(dA_CC, tl.load(w_tile).to(LOW), dw_CK)
    dw_CK = gathered(dw_CK, dM, q, bg, n, T, S, heads, H, R, C, K, LOW, True)
    k_CK = tl.load(tile(k + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    start_C = 0 * t_C
    if DOCUMENTS:
        start_C = tl.load(start_S + t_C)
    later_CC = (t_C[:, None] < t_C[None, :]) & (t_C[:, None] >= start_C[None, :])
    Z_CC = tl.load(tile(ZT, own, C, row_C, row_C))
    dB_CC = tl.where(later_CC, Z_CC, 0.0).to(LOW)
    dw_CK = tl.dot(tl.trans(dB_CC), k_CK, dw_CK)
    tl.store(tile(dw + g * K, first, groups * K, row_C, key_K), dw_CK, inside_C1)
