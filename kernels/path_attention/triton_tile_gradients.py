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

from mixtron.kernels.path_attention.triton_tiles import VARYING, before, part, upto
from mixtron.kernels.triton_tools import tile


@triton.jit
def gathered(
    acc_RE, left, right, row_R, bg, n, T, S, heads, H,
    R: tl.constexpr, C: tl.constexpr, E: tl.constexpr, LOW: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """acc_RE and rows of left^T right of a tile, of each query head that shares a key/value head.
    left is [B, H, S, C], right [B, H, S, E], or [B, T, H, E] where NATURAL."""
    b, g = bg // (H // R), bg % (H // R)
    row_C, column_E = tl.arange(0, C), tl.arange(0, E)
    inside_C1 = (n * C + row_C < T)[:, None]
    for r in range(R):
        h = g * R + r
        left_CR = tl.load(tile(left, (b * H + h) * S + n * C, C, row_C, row_R))
        if NATURAL:
            right_tile = tile(right + h * E, b * T + n * C, heads * E, row_C, column_E)
            right_CE = tl.load(right_tile, inside_C1, 0.0).to(LOW)
        else:
            right_CE = tl.load(tile(right, (b * H + h) * S + n * C, E, row_C, column_E))
        acc_RE = tl.dot(tl.trans(left_CR), right_CE, acc_RE)
    return acc_RE


@triton.jit(do_not_specialize=VARYING)
def key_gradient_kernel(
    q, w, beta, start_S, L, XT, M, dlogits, dk_carried, ZT, dk, dbeta_parts,
    scale, T, S, heads, H,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Rows of a tile's dk and Z^T, and of dbeta what passes through the same rows of X^T."""
    n, row_R = part(ROWS, C)
    bg = tl.program_id(1).to(tl.int64)
    G, groups = H // R, heads // R
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    own = bg * S + n * C
    w_CK = tl.load(tile(w, own, K, row_C, key_K)).to(LOW)
    dkc_tile = tile(dk_carried, own, K, row_R, key_K)
    dX_RC = tl.dot(tl.load(dkc_tile), tl.trans(w_CK))
    dX_RC = gathered(dX_RC, dlogits, M, row_R, bg, n, T, S, heads, H, R, C, C, LOW, False)
    XT_RC = tl.load(tile(XT, own, C, row_R, row_C)).to(tl.float32)
    dbeta_parts += tl.program_id(0) % (C // ROWS) * tl.num_programs(1) * S.to(tl.int64)
    tl.store(dbeta_parts + own + row_C, -tl.sum(dX_RC * XT_RC, 0))
    dX_RC *= -tl.load(beta + own + row_C)[None, :]
    Z_RC = tl.dot(dX_RC.to(LOW), tl.load(tile(L, own, C, row_C, row_C)).to(LOW)).to(LOW)
    tl.store(tile(ZT, own, C, row_R, row_C), Z_RC)
    Z_RC = tl.where(before(start_S, n * C, row_R, C, DOCUMENTS), Z_RC, 0.0).to(LOW)
    dk_RK = tl.dot(Z_RC, w_CK) * (1 / scale)
    dk_RK = gathered(dk_RK, dlogits, q, row_R, bg, n, T, S, heads, H, R, C, K, LOW, True)
    dk_RK = dk_RK * scale + tl.load(dkc_tile).to(tl.float32)
    dk_tile = tile(dk + g * K, b * T + n * C, groups * K, row_R, key_K)
    tl.store(dk_tile, dk_RK.to(dk.dtype.element_ty), (n * C + row_R < T)[:, None])


@triton.jit(do_not_specialize=VARYING)
def inverse_gradient_kernel(
    w, beta, start_S, L, XT, Y, M, dq_carried, dmaps, ZT, V, dA, dbeta_own, T, S, heads, H, nodes,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile's V and dA, and of dbeta what passes through Y."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    own = bg * S + n * C
    w_CK = tl.load(tile(w, own, K, row_C, key_K)).to(LOW)
    dP_KK = tl.load(tile(dmaps, (bg * nodes + n) * K, K, key_K, key_K))
    dY_CK = tl.dot(w_CK, dP_KK)
    dY_CK = gathered(dY_CK, M, dq_carried, row_C, bg, n, T, S, heads, H, R, C, K, LOW, False)
    Y_tile = tile(Y, own, K, row_C, key_K)
    tl.store(dbeta_own + own + row_C, -tl.sum(dY_CK * tl.load(Y_tile).to(tl.float32), 1))
    dY_CK *= -tl.load(beta + own + row_C)[:, None]
    L_CC = tl.load(tile(L, own, C, row_C, row_C)).to(LOW)
    V_CK = tl.dot(tl.trans(L_CC), dY_CK.to(LOW)).to(LOW)
    tl.store(tile(V, own, K, row_C, key_K), V_CK)
    dA_CC = tl.dot(V_CK, tl.trans(tl.load(Y_tile).to(LOW)))
    XT_CC = tl.load(tile(XT, own, C, row_C, row_C)).to(LOW)
    dA_CC = tl.dot(tl.trans(tl.load(tile(ZT, own, C, row_C, row_C))), XT_CC, dA_CC)
    below_CC = upto(start_S, n * C, row_C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    dA_CC = tl.where(below_CC, -dA_CC, 0.0)
    tl.store(tile(dA, own, C, row_C, row_C), dA_CC.to(LOW))


@triton.jit(do_not_specialize=VARYING)
def row_gradient_kernel(
    q, k, w, beta, start_S, XT, Y, dM, dk_carried, dmaps, ZT, V, dA, dbeta_parts, dw, dbeta,
    T, S, heads, H, nodes,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Rows of a tile's dw, and of dbeta the sum of all parts."""
    n, row_R = part(ROWS, C)
    bg = tl.program_id(1).to(tl.int64)
    G, groups = H // R, heads // R
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    t_R = n * C + row_R
    first, own = b * T + n * C, bg * S + n * C
    w_CK = tl.load(tile(w, own, K, row_C, key_K)).to(LOW)
    # A = tril(W W^T diag(beta)): what comes to beta_b w_b, of which both have a share.
    dA_CR = tl.load(tile(dA, own, C, row_C, row_R))
    dw_RK = tl.dot(tl.trans(dA_CR), w_CK)
    w_RK = tl.load(tile(w, own, K, row_R, key_K)).to(tl.float32)
    dbeta_R = tl.sum(dw_RK * w_RK, 1)
    for i in tl.static_range(PARTS):
        dbeta_R += tl.load(dbeta_parts + i * tl.num_programs(1) * S.to(tl.int64) + own + row_R)
    tl.store(dbeta + (b * T + t_R) * groups + g, dbeta_R, t_R < T)
    dkc_CK = tl.load(tile(dk_carried, own, K, row_C, key_K))
    XT_CR = tl.load(tile(XT, own, C, row_C, row_R)).to(LOW)
    dw_RK = tl.dot(tl.trans(XT_CR), dkc_CK, -dw_RK)
    dP_KK = tl.load(tile(dmaps, (bg * nodes + n) * K, K, key_K, key_K))
    Y_RK = tl.load(tile(Y, own, K, row_R, key_K)).to(LOW)
    dw_RK = tl.dot(Y_RK, tl.trans(dP_KK), dw_RK)
    beta_R = tl.load(beta + own + row_R)
    V_RK = tl.load(tile(V, own, K, row_R, key_K))
    dw_RK = V_RK.to(tl.float32) - beta_R[:, None] * dw_RK
    beta_C = tl.load(beta + own + row_C)
    dA_RC = tl.load(tile(dA, own, C, row_R, row_C)).to(tl.float32) * beta_C[None, :]
    dw_RK = tl.dot(dA_RC.to(LOW), w_CK, dw_RK)
    dw_RK = gathered(dw_RK, dM, q, row_R, bg, n, T, S, heads, H, R, C, K, LOW, True)
    k_tile = tile(k + g * K, first, groups * K, row_C, key_K)
    k_CK = tl.load(k_tile, (n * C + row_C < T)[:, None], 0.0).to(LOW)
    Z_CR = tl.load(tile(ZT, own, C, row_C, row_R))
    later_CR = row_C[:, None] < row_R[None, :]
    if DOCUMENTS:
        start_R = tl.load(start_S + t_R)
        later_CR = later_CR & ((n * C + row_C)[:, None] >= start_R[None, :])
    dw_RK = tl.dot(tl.trans(tl.where(later_CR, Z_CR, 0.0).to(LOW)), k_CK, dw_RK)
    tl.store(tile(dw + g * K, first, groups * K, row_R, key_K), dw_RK, (t_R < T)[:, None])


@triton.jit(do_not_specialize=VARYING)
def query_gradient_kernel(
    q, k, w, beta, start_S, XT, Y, dlogits, dq_carried, dq, M, dM, scale, T, S, heads, H,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries, from that of its logits and of the queries at its left
    edge; scaled M and dM, both before beta, for what its key/value head gathers."""
    a, row_R = part(ROWS, C)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    g, G, groups = h // R, H // R, heads // R
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    inside_R1 = (a * C + row_R < T)[:, None]
    inside_C1 = (a * C + row_C < T)[:, None]
    first, own, shared = b * T + a * C, bh * S + a * C, (b * G + g) * S + a * C
    seen_RC = upto(start_S, a * C, row_R, C, DOCUMENTS)
    weight_C = tl.load(beta + shared + row_C) * scale
    dlogits_RC = tl.load(tile(dlogits, own, C, row_R, row_C))
    dv_tile = tile(dq_carried, own, K, row_R, key_K)
    dM_RC = tl.dot(dlogits_RC, tl.load(tile(XT, shared, C, row_C, row_C)).to(LOW))
    Y_CK = tl.load(tile(Y, shared, K, row_C, key_K)).to(LOW)
    dM_RC = tl.dot(tl.load(dv_tile), tl.trans(Y_CK), dM_RC)
    dM_RC = tl.where(seen_RC, dM_RC * -weight_C[None, :], 0.0).to(LOW)
    tl.store(tile(dM, own, C, row_R, row_C), dM_RC)
    w_CK = tl.load(tile(w, shared, K, row_C, key_K)).to(LOW)
    k_CK = tl.load(tile(k + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    dq_RK = tl.dot(dlogits_RC, k_CK)
    dq_RK = (dq_RK + tl.load(dv_tile).to(tl.float32)) * scale
    dq_RK = tl.dot(dM_RC, w_CK, dq_RK)
    dq_tile = tile(dq + h * K, first, heads * K, row_R, key_K)
    tl.store(dq_tile, dq_RK.to(dq.dtype.element_ty), inside_R1)
    q_RK = tl.load(tile(q + h * K, first, heads * K, row_R, key_K), inside_R1, 0.0).to(LOW)
    M_RC = tl.where(seen_RC, tl.dot(q_RK, tl.trans(w_CK)), 0.0) * scale
    tl.store(tile(M, own, C, row_R, row_C), M_RC.to(LOW))
