"""The gradient of triton_tiles.py, in bf16 products, from that of the logits inside tiles, of the
queries at their tiles' left edges, of the keys at their right edges, and of the maps. As written
there, X = L B and Y = L W are before beta; with dX and dY the gradients behind beta, and Z and V
those of what L multiplies:

    dM = -tril(dlogits X^T + dq_left Y^T)
    dX = -(M^T dlogits + W dk_right^T),  Z = L^T diag(beta) dX,  dB = tril(Z, -1)
    dY = -(M^T dq_left + W dP),          V = L^T diag(beta) dY
    dA = -tril(Z X^T + V Y^T, -1)        because dL = -L dA L

beta is in U = diag(beta) W alone, of which A, M, the keys and the maps are made. So

    dU = dA^T W + dM^T Q - X dk_right - Y dP^T,   dbeta = rowsum(dU W)
    dW = V + dB K + dA U + diag(beta) dU
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
def query_tile(q, n, b, h, T, heads, C: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr):
    """[C, K] of an input, zeros behind the last token."""
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    pointers = tile(q + h * K, b * T + n * C, heads * K, row_C, key_K)
    return tl.load(pointers, (n * C + row_C < T)[:, None], 0.0).to(LOW)


@triton.jit
def logits_tile(dlogits, n, bh, S, C: tl.constexpr):
    """[C, C] of a query head: the lower triangle."""
    row_C = tl.arange(0, C)
    pointers = tile(dlogits, bh * S + n * C, C, row_C, row_C)
    return tl.load(pointers, lower(row_C, row_C, C), 0.0)


UNROLLED = tl.constexpr(2)
"""Query heads that share keys and whose turns are written out: operands wait in registers from one
sum to the next. Further ones are taken in loops, because a multiprocessor has no room for more."""


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
    seen_CC = upto(start_S, n * C, row_C, C, DOCUMENTS)
    below_CC, above_CC = lower(row_C, row_C, C), upper(row_C, row_C, C)

    w_CK = tl.load(w_tile).to(LOW)
    dX_CC = tl.dot(tl.load(dk_tile), tl.trans(w_CK))  # of X^T: a row is a key's
    for r in tl.static_range(min(R, UNROLLED)):
        h = g * R + r
        q_CK = query_tile(q, n, b, h, T, heads, C, K, LOW)
        M_CC = tl.where(seen_CC, tl.dot(q_CK, tl.trans(w_CK)) * scale, 0.0).to(LOW)
        dlogits_CC = tl.load(tile(dlogits, (b * H + h) * S + n * C, C, row_C, row_C), below_CC, 0.0)
        dX_CC = tl.dot(tl.trans(dlogits_CC), M_CC, dX_CC)
    if R > UNROLLED:
        for h in range(g * R + UNROLLED, g * R + R):
            q_CK = query_tile(q, n, b, h, T, heads, C, K, LOW)
            M_CC = tl.where(seen_CC, tl.dot(q_CK, tl.trans(w_CK)) * scale, 0.0).to(LOW)
            dX_CC = tl.dot(tl.trans(logits_tile(dlogits, n, b * H + h, S, C)), M_CC, dX_CC)
    L_tile = tile(L, own, C, row_C, row_C)
    L_CC = tl.load(L_tile, below_CC, 0.0).to(LOW)
    Z_CC = tl.dot((dX_CC * -beta_C[None, :]).to(LOW), L_CC)
    Z_CC = tl.where(before(start_S, n * C, row_C, C, DOCUMENTS), Z_CC, 0.0).to(LOW)
    dk_CK = tl.dot(Z_CC, w_CK) * (1 / scale)
    for r in tl.static_range(min(R, UNROLLED)):
        h = g * R + r
        if R > 1:
            q_CK = query_tile(q, n, b, h, T, heads, C, K, LOW)
            dlogits_CC = tl.load(
                tile(dlogits, (b * H + h) * S + n * C, C, row_C, row_C), below_CC, 0.0
            )
        dk_CK = tl.dot(tl.trans(dlogits_CC), q_CK, dk_CK)
    if R > UNROLLED:
        for h in range(g * R + UNROLLED, g * R + R):
            q_CK = query_tile(q, n, b, h, T, heads, C, K, LOW)
            dk_CK = tl.dot(tl.trans(logits_tile(dlogits, n, b * H + h, S, C)), q_CK, dk_CK)
    dk_CK = dk_CK * scale + tl.load(dk_tile).to(tl.float32)
    out_tile = tile(dk + g * K, first, groups * K, row_C, key_K)
    inside_C1 = (n * C + row_C < T)[:, None]
    tl.store(out_tile, dk_CK.to(dk.dtype.element_ty), inside_C1)

    dY_CK = tl.dot(tl.load(w_tile).to(LOW), tl.load(dP_tile))
    for r in tl.static_range(min(R, UNROLLED)):
        h = g * R + r
        if R > 1:
            q_CK = query_tile(q, n, b, h, T, heads, C, K, LOW)
            M_CC = tl.where(seen_CC, tl.dot(q_CK, tl.trans(w_CK)) * scale, 0.0).to(LOW)
        dq_CK = tl.load(tile(dq_left, (b * H + h) * S + n * C, K, row_C, key_K))
        dY_CK = tl.dot(tl.trans(M_CC), dq_CK, dY_CK)
    if R > UNROLLED:
        for h in range(g * R + UNROLLED, g * R + R):
            q_CK = query_tile(q, n, b, h, T, heads, C, K, LOW)
            M_CC = tl.where(seen_CC, tl.dot(q_CK, tl.trans(w_CK)) * scale, 0.0).to(LOW)
            dq_CK = tl.load(tile(dq_left, (b * H + h) * S + n * C, K, row_C, key_K))
            dY_CK = tl.dot(tl.trans(M_CC), dq_CK, dY_CK)
    L_CC = tl.load(L_tile, below_CC, 0.0).to(LOW)
    dw_CK = tl.dot(tl.trans(L_CC), (dY_CK * -beta_C[:, None]).to(LOW))
    dA_CC = tl.dot(tl.trans(Z_CC), tl.load(XT_tile, above_CC, 0.0).to(LOW))
    dA_CC = tl.dot(dw_CK.to(LOW), tl.trans(tl.load(Y_tile).to(LOW)), dA_CC)
    dA_CC = tl.where(seen_CC & (row_C[:, None] > row_C[None, :]), -dA_CC, 0.0).to(LOW)
    # Of diag(beta) W, less its sign: all that beta is in.
    du_CK = tl.dot(tl.load(Y_tile).to(LOW), tl.trans(tl.load(dP_tile)))
    du_CK = tl.dot(tl.trans(tl.load(XT_tile, above_CC, 0.0).to(LOW)), tl.load(dk_tile), du_CK)
    du_CK = tl.dot(tl.trans(-dA_CC), w_CK, du_CK)
    for r in tl.static_range(min(R, UNROLLED)):
        h = g * R + r
        q_CK = query_tile(q, n, b, h, T, heads, C, K, LOW)
        dM_CC = tl.load(tile(dM, (b * H + h) * S + n * C, C, row_C, row_C), below_CC, 0.0)
        du_CK = tl.dot(tl.trans(dM_CC), q_CK, du_CK)
    if R > UNROLLED:
        for h in range(g * R + UNROLLED, g * R + R):
            q_CK = query_tile(q, n, b, h, T, heads, C, K, LOW)
            du_CK = tl.dot(tl.trans(logits_tile(dM, n, b * H + h, S, C)), q_CK, du_CK)
    dbeta_C = -tl.sum(du_CK * tl.load(w_tile).to(tl.float32), 1)
    tl.store(dbeta + (first + row_C) * groups + g, dbeta_C, n * C + row_C < T)
    dw_CK -= beta_C[:, None] * du_CK
    weighed_CK = (tl.load(w_tile).to(tl.float32) * beta_C[:, None]).to(LOW)
    dw_CK = tl.dot(dA_CC, weighed_CK, dw_CK)
    dw_CK = tl.dot(tl.trans(Z_CC), query_tile(k, n, b, g, T, groups, C, K, LOW), dw_CK)
    tl.store(tile(dw + g * K, first, groups * K, row_C, key_K), dw_CK, inside_C1)
