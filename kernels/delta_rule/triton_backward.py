"""The first half of the delta rule's backward on a GPU: the gradients of v and of the states, by a
scan from the end. The equations are in README.md."""

import triton
import triton.language as tl

from mixtron.kernels.triton_tools import tile


@triton.jit
def reverse_scan_kernel(
    q_BTHK,
    k_BTHK,
    do_BTJV,
    X_BJTC,
    P_BJTC,
    rows_7BJT,
    across_BJN,
    dafter_BJKV,
    dv_BTJV,
    dstates_BJNVK,
    dbefore_BJKV,
    T,
    N,
    begin,
    chunks,
    plane,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    PIECES: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of v and of the state after each of so many chunks from `begin` on, and of the
    state before them, of BLOCK_V columns of one value head.

    Of more than one piece, in which each sequence is cut, only the gradient of the state before is
    asked for, and not the first's."""
    column = tl.program_id(0) * BLOCK_V
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    head = (j // (J // H)) * K
    dS_VK = tl.trans(tl.load(tile(dafter_BJKV + column, bj * K, V, key_K, value_V)).to(tl.float32))
    count = chunks
    if PIECES > 1:
        count = tl.where(b % PIECES > 0, chunks, 0)
    for step in tl.range(0, count, num_stages=STAGES):
        n = begin + chunks - 1 - step
        first = b * T + n * C
        chunk = bj * N * C + n * C
        inside_C1 = (row_C < T - n * C)[:, None]
        k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
        q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
        do_tile = tile(do_BTJV + j * V + column, first, J * V, row_C, value_V)
        do_CV = tl.load(do_tile, inside_C1, 0.0)
        X_CC = tl.load(tile(X_BJTC, chunk, C, row_C, row_C))
        P_CC = tl.load(tile(P_BJTC, chunk, C, row_C, row_C))
        # Row factors are loaded where they are used: there are few registers.
        across = tl.load(across_BJN + bj * N + n)
        k_CK, q_CK = k_CK.to(PRODUCT), q_CK.to(PRODUCT)
        dS_low_VK = dS_VK.to(PRODUCT)
        if PIECES == 1:
            stored = (bj * chunks + n - begin) * V + column
            dS_tile = tile(dstates_BJNVK, stored, K, value_V, key_K)
            tl.store(dS_tile, dS_low_VK.to(dstates_BJNVK.dtype.element_ty))
        do_VC = tl.trans(do_CV.to(PRODUCT))
        dU_VC = tl.dot(dS_low_VK, tl.trans(k_CK))
        write_C = tl.load(rows_7BJT + plane + chunk + row_C)
        dU_VC *= write_C[None, :]
        dU_VC = tl.dot(do_VC, P_CC.to(PRODUCT), dU_VC)
        dR_VC = tl.dot(dU_VC.to(PRODUCT), X_CC.to(PRODUCT))
        rv_C = tl.load(rows_7BJT + 5 * plane + chunk + row_C)
        dR_VC *= rv_C[None, :]
        if PIECES == 1:
            dv_tile = tile(dv_BTJV + j * V + column, first, J * V, row_C, value_V)
            tl.store(dv_tile, tl.trans(dR_VC.to(dv_BTJV.dtype.element_ty)), inside_C1)
        query_C = tl.load(rows_7BJT + 2 * plane + chunk + row_C)
        read_VC = (do_VC.to(tl.float32) * query_C[None, :]).to(PRODUCT)
        dS_VK = tl.dot(read_VC, q_CK, dS_VK * across)
        read_C = tl.load(rows_7BJT + chunk + row_C)
        seen_VC = (-dR_VC * read_C[None, :]).to(PRODUCT)
        dS_VK = tl.dot(seen_VC, k_CK, dS_VK)
    tl.store(tile(dbefore_BJKV + column, bj * K, V, key_K, value_V), tl.trans(dS_VK))
