"""The UT transform of every tile on a GPU, and its gradient: what blocks.py does in torch.

With A = tril(W W^T diag(beta), -1), L = (I + A)^-1, U = diag(beta) L and B = tril(W K^T, -1), all
inside a document:

    X = U B,  Y = U W,  M = tril(Q W^T)
    logits inside Q K^T - M X,  q to the left edge Q - M Y
    k to the right edge K - X^T W,  P = I - W^T Y

P is multiplied by others hundreds of times: W W^T and P are fp32 products, the rest is in tf32, and
gradients are in bf16.
"""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.triton_tools import INTERPRETED, tile

WARPS = 8


@dataclass
class Solved:
    """Of every tile, fp32."""

    L_BGSC: Tensor
    X_BGSC: Tensor
    Y_BGSK: Tensor
    k_BGSK: Tensor
    map_BGNKK: Tensor


class Tiles(torch.autograd.Function):
    """q carried to its tile's left edge [B, H, S, K], k to its right edge [B, G, S, K], the tiles'
    maps [B, G, N, K, K] and the logits inside tiles [B, H, S, C], not masked; all fp32."""

    @staticmethod
    def forward(ctx, q, k, w, beta, scale, start_S, S, C):  # type: ignore[override]
        (B, T, H, K), G = q.shape, k.shape[2]
        solved = _solve(k, w, beta, start_S, S, C)
        q_BHSK = w.new_empty(B, H, S, K)
        logits_BHSC = w.new_empty(B, H, S, C)
        carry_queries_kernel[(S // C, B * H)](
            q, k, w, start_S, solved.X_BGSC, solved.Y_BGSK, q_BHSK, logits_BHSC, scale, T, S,
            H=H, G=G, K=K, C=C, DOCUMENTS=start_S is not None, num_warps=WARPS, num_stages=1,
        )  # fmt: skip
        ctx.save_for_backward(q, k, w, beta, start_S, solved.L_BGSC, solved.X_BGSC, solved.Y_BGSK)
        ctx.options = scale, S, C
        return q_BHSK, solved.k_BGSK, solved.map_BGNKK, logits_BHSC

    @staticmethod
    def backward(ctx, dqc_BHSK, dkc_BGSK, dmap_BGNKK, dlogits_BHSC):  # type: ignore[override]
        q, k, w, beta, start_S, L_BGSC, X_BGSC, Y_BGSK = ctx.saved_tensors
        scale, S, C = ctx.options
        (B, T, H, K), G = q.shape, k.shape[2]
        shape = {"H": H, "G": G, "K": K, "C": C, "LOW": tl.float32 if INTERPRETED else tl.bfloat16}
        launch = {"num_warps": WARPS, "num_stages": 1}
        masked = {"DOCUMENTS": start_S is not None}
        dq, dk, dw, dbeta = (torch.empty_like(x) for x in (q, k, w, beta))
        low = torch.float32 if INTERPRETED else torch.bfloat16
        M_BHSC, dM_BHSC = (torch.empty_like(dlogits_BHSC, dtype=low) for _ in range(2))
        dqc_BHSK, dlogits_BHSC = dqc_BHSK.contiguous(), dlogits_BHSC.contiguous()
        query_gradient_kernel[(S // C, B * H)](
            q, k, w, start_S, X_BGSC, Y_BGSK, dqc_BHSK, dlogits_BHSC, dq, M_BHSC, dM_BHSC,
            scale, T, S, **shape, **masked, **launch,
        )  # fmt: skip
        dX, dY, dk_own, dw_own = (torch.empty_like(x) for x in (X_BGSC, Y_BGSK, Y_BGSK, Y_BGSK))
        for left, right, out, factor in (
            (M_BHSC, dlogits_BHSC, dX, -1.0),
            (M_BHSC, dqc_BHSK, dY, -1.0),
            (dlogits_BHSC, q, dk_own, scale),
            (dM_BHSC, q, dw_own, scale),
        ):
            sum_kernel[(S // C, B * G)](
                left, right, out, factor, T, S, E=out.shape[3],
                NATURAL=right is q, **shape, **launch,
            )  # fmt: skip
        key_gradient_kernel[(S // C, B * G)](
            k, w, beta, start_S, L_BGSC, X_BGSC, Y_BGSK, dkc_BGSK.contiguous(),
            dmap_BGNKK.contiguous(), dX, dY, dk_own, dw_own, dk, T, S, **shape, **masked, **launch,
        )  # fmt: skip
        inverse_gradient_kernel[(S // C, B * G)](
            k, w, beta, start_S, L_BGSC, dX, dY, dw_own, dw, dbeta, T, S,
            **shape, **masked, **launch,
        )  # fmt: skip
        return dq, dk, dw, dbeta, None, None, None, None


def _solve(k: Tensor, w: Tensor, beta: Tensor, start_S: Tensor | None, S: int, C: int) -> Solved:
    B, T, G, K = k.shape
    w_BGNCK = F.pad(w, (0, 0, 0, 0, 0, S - T)).unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4)
    w_BGNCK = w_BGNCK.contiguous()
    gram_BGNCC = w_BGNCK @ w_BGNCK.mT
    L_BGSC, U_BGNCC = w.new_empty(B, G, S, C), torch.empty_like(gram_BGNCC)
    grid, documents = (S // C, B * G), start_S is not None
    inverse_kernel[grid](
        gram_BGNCC, beta, start_S, L_BGSC, U_BGNCC, T, S,
        G=G, C=C, DOCUMENTS=documents, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    Y_BGNCK = U_BGNCC @ w_BGNCK
    identity_KK = torch.eye(K, dtype=w.dtype, device=w.device)
    map_BGNKK = identity_KK - w_BGNCK.mT @ Y_BGNCK
    X_BGSC, k_BGSK = torch.empty_like(L_BGSC), w.new_empty(B, G, S, K)
    carry_keys_kernel[grid](
        k, w, start_S, U_BGNCC, X_BGSC, k_BGSK, T, S,
        G=G, K=K, C=C, DOCUMENTS=documents, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return Solved(L_BGSC, X_BGSC, Y_BGNCK.flatten(2, 3), k_BGSK, map_BGNKK)


@triton.jit
def inverse(A_CC, C: tl.constexpr):
    """(I + A)^-1 for a strictly lower triangular A [C, C] fp32, C >= 32.

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
    for half in tl.static_range(4, 7):
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


@triton.jit(do_not_specialize=("T",))
def inverse_kernel(
    gram, beta, start_S, L, U, T, S, G: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """L and U of a tile from W W^T."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_C = tl.arange(0, C)
    t_C = n * C + row_C
    own = bg * S + n * C
    beta_C = tl.load(beta + (b * T + t_C) * G + g, t_C < T, 0.0)
    below_CC = pairs(start_S, n * C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    A_CC = tl.load(tile(gram, own, C, row_C, row_C)) * beta_C[None, :]
    L_CC = inverse(tl.where(below_CC, A_CC, 0.0), C)
    tl.store(tile(L, own, C, row_C, row_C), L_CC)
    tl.store(tile(U, own, C, row_C, row_C), L_CC * beta_C[:, None])


@triton.jit(do_not_specialize=("T",))
def carry_keys_kernel(
    k, w, start_S, U, X, k_carried, T, S,
    G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """X and the keys carried to the right edge."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    inside_C1 = (n * C + row_C < T)[:, None]
    first, own = b * T + n * C, bg * S + n * C
    below_CC = pairs(start_S, n * C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    w_CK = tl.load(tile(w + g * K, first, G * K, row_C, key_K), inside_C1, 0.0)
    k_CK = tl.load(tile(k + g * K, first, G * K, row_C, key_K), inside_C1, 0.0).to(tl.float32)
    B_CC = tl.where(below_CC, tl.dot(w_CK, tl.trans(k_CK), input_precision="tf32"), 0.0)
    U_CC = tl.load(tile(U, own, C, row_C, row_C))
    X_CC = tl.dot(U_CC, B_CC, input_precision="tf32")
    tl.store(tile(X, own, C, row_C, row_C), X_CC)
    k_CK -= tl.dot(tl.trans(X_CC), w_CK, input_precision="tf32")
    tl.store(tile(k_carried, own, K, row_C, key_K), k_CK)


@triton.jit(do_not_specialize=("T",))
def carry_queries_kernel(
    q, k, w, start_S, X, Y, q_carried, logits, scale, T, S,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A query head's logits inside a tile, and its queries carried to the left edge."""
    n = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // (H // G)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    inside_C1 = (n * C + row_C < T)[:, None]
    first, own, shared = b * T + n * C, bh * S + n * C, (b * G + g) * S + n * C
    q_CK = tl.load(tile(q + h * K, first, H * K, row_C, key_K), inside_C1, 0.0).to(tl.float32)
    w_CK = tl.load(tile(w + g * K, first, G * K, row_C, key_K), inside_C1, 0.0)
    M_CC = tl.dot(q_CK, tl.trans(w_CK), input_precision="tf32")
    M_CC = tl.where(pairs(start_S, n * C, C, DOCUMENTS), M_CC, 0.0)
    Y_CK = tl.load(tile(Y, shared, K, row_C, key_K))
    carried_CK = q_CK - tl.dot(M_CC, Y_CK, input_precision="tf32")
    tl.store(tile(q_carried, own, K, row_C, key_K), carried_CK * scale)
    k_CK = tl.load(tile(k + g * K, first, G * K, row_C, key_K), inside_C1, 0.0).to(tl.float32)
    X_CC = tl.load(tile(X, shared, C, row_C, row_C))
    logits_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision="tf32")
    logits_CC -= tl.dot(M_CC, X_CC, input_precision="tf32")
    tl.store(tile(logits, own, C, row_C, row_C), logits_CC * scale)


@triton.jit(do_not_specialize=("T",))
def query_gradient_kernel(
    q, k, w, start_S, X, Y, dq_carried, dlogits, dq, M, dM, scale, T, S,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A query head's dq, and for what its key/value head gathers M and dM."""
    n = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    g = h // (H // G)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    inside_C1 = (n * C + row_C < T)[:, None]
    first, own, shared = b * T + n * C, bh * S + n * C, (b * G + g) * S + n * C
    seen_CC = pairs(start_S, n * C, C, DOCUMENTS)
    q_CK = tl.load(tile(q + h * K, first, H * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    w_CK = tl.load(tile(w + g * K, first, G * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    M_CC = tl.where(seen_CC, tl.dot(q_CK, tl.trans(w_CK)), 0.0) * scale
    tl.store(tile(M, own, C, row_C, row_C), M_CC.to(M.dtype.element_ty))
    dqc_CK = tl.load(tile(dq_carried, own, K, row_C, key_K))
    Y_CK = tl.load(tile(Y, shared, K, row_C, key_K)).to(LOW)
    dM_CC = tl.dot(dqc_CK.to(LOW), tl.trans(Y_CK))
    dL_CC = tl.load(tile(dlogits, own, C, row_C, row_C)).to(LOW)
    X_CC = tl.load(tile(X, shared, C, row_C, row_C)).to(LOW)
    dM_CC = tl.where(seen_CC, -tl.dot(dL_CC, tl.trans(X_CC), dM_CC), 0.0)
    tl.store(tile(dM, own, C, row_C, row_C), dM_CC.to(dM.dtype.element_ty))
    k_CK = tl.load(tile(k + g * K, first, G * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    dq_CK = tl.dot(dL_CC, k_CK, dqc_CK)
    dq_CK = tl.dot(dM_CC.to(LOW), w_CK, dq_CK) * scale
    dq_tile = tile(dq + h * K, first, H * K, row_C, key_K)
    tl.store(dq_tile, dq_CK.to(dq.dtype.element_ty), inside_C1)


@triton.jit(do_not_specialize=("T",))
def sum_kernel(
    left, right, out, factor, T, S,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
    E: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """factor left^T right of a tile, summed over a key/value head's query heads. left is
    [B, H, S, C], right [B, H, S, E], or [B, T, H, E] where NATURAL."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_C, column_E = tl.arange(0, C), tl.arange(0, E)
    inside_C1 = (n * C + row_C < T)[:, None]
    acc_CE = tl.zeros([C, E], tl.float32)
    for r in range(H // G):
        h = g * (H // G) + r
        left_CC = tl.load(tile(left, (b * H + h) * S + n * C, C, row_C, row_C)).to(LOW)
        if NATURAL:
            right_tile = tile(right + h * E, b * T + n * C, H * E, row_C, column_E)
        else:
            right_tile = tile(right, (b * H + h) * S + n * C, E, row_C, column_E)
        right_CE = tl.load(right_tile, inside_C1, 0.0).to(LOW)
        acc_CE = tl.dot(tl.trans(left_CC), right_CE, acc_CE)
    tl.store(tile(out, bg * S + n * C, E, row_C, column_E), acc_CE * factor)


@triton.jit(do_not_specialize=("T",))
def key_gradient_kernel(
    k, w, beta, start_S, L, X, Y, dk_carried, dmaps, dX, dY, dk_own, dw_own, dk, T, S,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """A tile's dk; dX, dY and what dw has so far, each in the place of what the queries gave."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first, own = b * T + n * C, bg * S + n * C
    below_CC = pairs(start_S, n * C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    w_CK = tl.load(tile(w + g * K, first, G * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    beta_C = tl.load(beta + (b * T + t_C) * G + g, t_C < T, 0.0)
    dkc_CK = tl.load(tile(dk_carried, own, K, row_C, key_K)).to(LOW)
    dX_tile, dY_tile = tile(dX, own, C, row_C, row_C), tile(dY, own, K, row_C, key_K)
    dX_CC = tl.load(dX_tile) - tl.dot(w_CK, tl.trans(dkc_CK))
    tl.store(dX_tile, dX_CC)
    L_CC = tl.load(tile(L, own, C, row_C, row_C))
    U_CC = (L_CC * beta_C[:, None]).to(LOW)
    dB_CC = tl.where(below_CC, tl.dot(tl.trans(U_CC), dX_CC.to(LOW)), 0.0).to(LOW)
    dk_CK = tl.load(tile(dk_own, own, K, row_C, key_K))
    dk_CK += tl.load(tile(dk_carried, own, K, row_C, key_K))
    dk_CK = tl.dot(tl.trans(dB_CC), w_CK, dk_CK)
    dk_tile = tile(dk + g * K, first, G * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk.dtype.element_ty), inside_C1)
    dw_tile = tile(dw_own, own, K, row_C, key_K)
    k_CK = tl.load(tile(k + g * K, first, G * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    dw_CK = tl.dot(dB_CC, k_CK, tl.load(dw_tile))
    X_CC = tl.load(tile(X, own, C, row_C, row_C)).to(LOW)
    dw_CK -= tl.dot(X_CC, dkc_CK)
    dP_KK = tl.load(tile(dmaps, (bg * (S // C) + n) * K, K, key_K, key_K)).to(LOW)
    Y_CK = tl.load(tile(Y, own, K, row_C, key_K)).to(LOW)
    dw_CK -= tl.dot(Y_CK, tl.trans(dP_KK))
    dY_CK = tl.load(dY_tile) - tl.dot(w_CK, dP_KK)
    tl.store(dY_tile, dY_CK)
    dw_CK = tl.dot(tl.trans(U_CC), dY_CK.to(LOW), dw_CK)
    tl.store(dw_tile, dw_CK)


@triton.jit(do_not_specialize=("T",))
def inverse_gradient_kernel(
    k, w, beta, start_S, L, dX, dY, dw_own, dw, dbeta, T, S,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """The rest of a tile's dw, and dbeta: what passes through L."""
    n = tl.program_id(0)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    t_C = n * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first, own = b * T + n * C, bg * S + n * C
    below_CC = pairs(start_S, n * C, C, DOCUMENTS) & (row_C[:, None] > row_C[None, :])
    w_CK = tl.load(tile(w + g * K, first, G * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    beta_C = tl.load(beta + (b * T + t_C) * G + g, t_C < T, 0.0)
    k_CK = tl.load(tile(k + g * K, first, G * K, row_C, key_K), inside_C1, 0.0).to(LOW)
    B_CC = tl.where(below_CC, tl.dot(w_CK, tl.trans(k_CK)), 0.0).to(LOW)
    dX_CC = tl.load(tile(dX, own, C, row_C, row_C)).to(LOW)
    dU_CC = tl.dot(dX_CC, tl.trans(B_CC))
    dY_CK = tl.load(tile(dY, own, K, row_C, key_K)).to(LOW)
    dU_CC = tl.dot(dY_CK, tl.trans(w_CK), dU_CC)
    L_CC = tl.load(tile(L, own, C, row_C, row_C))
    dbeta_C = tl.sum(dU_CC * L_CC, 1)
    # Of L = (I + A)^-1: dA = -L^T dL L^T.
    dL_CC = (dU_CC * beta_C[:, None]).to(LOW)
    L_CC = L_CC.to(LOW)
    dA_CC = tl.dot(tl.trans(L_CC), dL_CC).to(LOW)
    dA_CC = tl.where(below_CC, -tl.dot(dA_CC, tl.trans(L_CC)), 0.0)
    dbeta_C += tl.sum(dA_CC * tl.dot(w_CK, tl.trans(w_CK)), 0)
    tl.store(dbeta + (b * T + t_C) * G + g, dbeta_C, t_C < T)
    dG_CC = (dA_CC * beta_C[None, :]).to(LOW)
    dw_CK = tl.dot(dG_CC, w_CK, tl.load(tile(dw_own, own, K, row_C, key_K)))
    dw_CK = tl.dot(tl.trans(dG_CC), w_CK, dw_CK)
    tl.store(tile(dw + g * K, first, G * K, row_C, key_K), dw_CK, inside_C1)
