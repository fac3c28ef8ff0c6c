"""Log-linear attention on the gated delta base, forward on a GPU: every chunk as a linear map, the
states that it is entered with by a scan, then the outputs. The equations are in README.md.

    o = (Lambda * M) v + sum over nodes of lambda (Z S),   S' = across S - E S,   write = Y^T v
"""

# Loads have no type outside of a kernel.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.log_linear_attention.triton_forward import load_chunk, of_level
from mixtron.kernels.triton_tools import tile, unit_lower_inverse


@triton.jit
def load_lambda(lambda_C, level, inside_C, L: tl.constexpr):
    """Of a chunk's tokens, whose lambda of level 0 lies at `lambda_C`."""
    return tl.load(lambda_C + level, inside_C & (level < L), 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def log_linear_delta_maps_kernel(
    q_BTHK,
    k_BTHK,
    log_decay_BTJ,
    beta_BTJ,
    chunk_N4,
    cumulative_BJNC,
    X_BJNCC,
    M_BJNCC,
    Z_BJNCK,
    Y_BJNCK,
    E_BJNKK,
    scale,
    T,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and value head: X = (I + A)^-1 diag(beta), M = P X, Z, Y = X^T L and E."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    chunk = bj * N + n
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    first, begin, end, _ = load_chunk(chunk_N4, n)
    first += b * T
    inside_C = (row_C >= begin) & (row_C < end)
    gate_C = (first + row_C) * J + j
    # Beyond that nothing is left, and larger sums would cost the others their precision.
    g_C = tl.maximum(tl.load(log_decay_BTJ + gate_C, inside_C, 0.0).to(tl.float32), -64.0)
    upto_CC = row_C[:, None] >= row_C[None, :]
    G_C = tl.sum(tl.where(upto_CC, g_C[None, :], 0.0), 1)
    total = tl.sum(g_C, 0)
    tl.store(cumulative_BJNC + chunk * C + row_C, G_C)
    beta_C = tl.load(beta_BTJ + gate_C, inside_C, 0.0).to(tl.float32)
    head = (j // (J // H)) * K
    q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C[:, None], 0.0)
    k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C[:, None], 0.0)
    q_CK, k_CK = q_CK.to(PRODUCT), k_CK.to(PRODUCT)

    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf")))
    P_CC = tl.dot(q_CK, tl.trans(k_CK)) * decay_CC * scale
    A_CC = tl.dot(k_CK, tl.trans(k_CK)) * decay_CC * beta_C[:, None]
    A_CC = tl.where(row_C[:, None] > row_C[None, :], A_CC, 0.0)
    # Not 0: backward divides by it.
    weight_C = tl.where(inside_C, tl.maximum(beta_C, 2.0**-40), 0.0)
    X_CC = (unit_lower_inverse(A_CC) * weight_C[None, :]).to(PRODUCT)
    M_CC = tl.dot(P_CC.to(PRODUCT), X_CC).to(PRODUCT)
    seen_CK = (k_CK.to(tl.float32) * tl.exp(G_C)[:, None]).to(PRODUCT)
    kept_CK = (k_CK.to(tl.float32) * tl.exp(total - G_C)[:, None]).to(PRODUCT)
    Z_CK = q_CK.to(tl.float32) * (tl.exp(G_C) * scale)[:, None] - tl.dot(M_CC, seen_CK)
    Y_CK = tl.dot(tl.trans(X_CC), kept_CK).to(PRODUCT)
    E_KK = tl.dot(tl.trans(Y_CK), seen_CK)

    low = X_BJNCC.dtype.element_ty
    tl.store(tile(X_BJNCC, chunk * C, C, row_C, row_C), X_CC.to(low))
    tl.store(tile(M_BJNCC, chunk * C, C, row_C, row_C), M_CC.to(low))
    tl.store(tile(Z_BJNCK, chunk * C, K, row_C, key_K), Z_CK.to(low))
    tl.store(tile(Y_BJNCK, chunk * C, K, row_C, key_K), Y_CK.to(low))
    tl.store(tile(E_BJNKK, chunk * K, K, key_K, key_K), E_KK.to(low))


@triton.jit(do_not_specialize=["T", "N", "LIVE", "low", "high", "ARRIVING", "LEAVING"])
def log_linear_delta_scan_kernel(
    v_BTJV,
    Y_BJNCK,
    E_BJNKK,
    cumulative_BJNC,
    chunk_N4,
    live_N,
    group_R2,
    first_write_BJKV,
    arrival_N,
    arriving_BJAKV,
    departure_N,
    leaving_BJAKV,
    nodes_BJRMKV,
    states_BJSKV,
    T,
    N,
    LIVE,
    low,
    high,
    ARRIVING,
    LEAVING,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """The nodes of bits low .. high - 1 before every chunk of a group, one after another, of
    BLOCK_V columns: each passes the chunk; and the smallest, as many as its number ends in ones,
    become one with what the chunk writes (LOWEST), or with the node that the bits below leave."""
    column = tl.program_id(0) * BLOCK_V
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    nodes = (bj * tl.num_programs(2) + tl.program_id(2)) * (high - low)
    node_at = nodes_BJRMKV + column
    group = group_R2 + tl.program_id(2) * 2
    for n in range(tl.load(group), tl.load(group + 1)):
        first, begin, end, number = load_chunk(chunk_N4, n)
        carry = (number + 1) & -(number + 1)
        arrives = carry >= (1 << low)
        held = (number >> low) & ((1 << (high - low)) - 1)
        if (held != 0) | arrives:
            chunk = bj * N + n
            E_KK = tl.load(tile(E_BJNKK, chunk * K, K, key_K, key_K)).to(PRODUCT)
            across = tl.exp(tl.load(cumulative_BJNC + chunk * C + C - 1))
            merged_KV = tl.zeros([K, BLOCK_V], tl.float32)
            if LOWEST:
                first += b * T
                inside_C1 = ((row_C >= begin) & (row_C < end))[:, None]
                v_tile = tile(v_BTJV + j * V + column, first, J * V, row_C, value_V)
                v_CV = tl.load(v_tile, inside_C1, 0.0).to(PRODUCT)
                Y_CK = tl.load(tile(Y_BJNCK, chunk * C, K, row_C, key_K)).to(PRODUCT)
                merged_KV = tl.dot(tl.trans(Y_CK), v_CV)
                if HAS_FIRST:  # noqa: SIM102 (a constant and a value)
                    if n == 0:
                        first_write = tile(first_write_BJKV + column, bj * K, V, key_K, value_V)
                        merged_KV += tl.load(first_write).to(tl.float32)
            elif arrives:
                at = (bj * ARRIVING + tl.load(arrival_N + n)) * K
                merged_KV = tl.load(tile(arriving_BJAKV + column, at, V, key_K, value_V))
            live = tl.load(live_N + n)
            for m in range(low):
                live += (number >> m) & 1
            target = 0
            for m in range(high - low):
                if ((held >> m) & 1) != 0:
                    pointers = tile(node_at, (nodes + m) * K, V, key_K, value_V)
                    S_KV = tl.load(pointers)
                    low_KV = S_KV.to(PRODUCT)
                    state = tile(states_BJSKV + column, (bj * LIVE + live) * K, V, key_K, value_V)
                    tl.store(state, low_KV.to(states_BJSKV.dtype.element_ty))
                    S_KV = across * S_KV - tl.dot(E_KK, low_KV)
                    if (1 << (low + m)) < carry:
                        merged_KV += S_KV
                        target += 1
                    else:
                        tl.store(pointers, S_KV)
                    live += 1
            if arrives:
                merged_at = tile(node_at, (nodes + target) * K, V, key_K, value_V)
                if not HIGHEST:  # noqa: SIM102 (a constant and a value)
                    if carry >= (1 << high):
                        at = (bj * LEAVING + tl.load(departure_N + n)) * K
                        merged_at = tile(leaving_BJAKV + column, at, V, key_K, value_V)
                tl.store(merged_at, merged_KV)
            # Other threads read it next.
            tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "M", "LIVE"])
def log_linear_delta_output_kernel(
    v_BTJV,
    lambda_BTJL,
    M_BJNCC,
    Z_BJNCK,
    states_BJSKV,
    chunk_N4,
    live_N,
    o_BTJV,
    T,
    M,
    LIVE,
    L: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """o of one chunk and value head."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    chunk = bj * N + n
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    first, begin, end, number = load_chunk(chunk_N4, n)
    first += b * T
    inside_C = (row_C >= begin) & (row_C < end)
    v_tile = tile(v_BTJV + j * V, first, J * V, row_C, value_V)
    v_CV = tl.load(v_tile, inside_C[:, None], 0.0).to(PRODUCT)
    M_CC = tl.load(tile(M_BJNCC, chunk * C, C, row_C, row_C)).to(tl.float32)
    lambda_at = lambda_BTJL + ((first + row_C) * J + j) * L
    distance_CC = row_C[:, None] ^ row_C[None, :]
    for level in tl.static_range(0, 7):
        lambda_C = load_lambda(lambda_at, level, inside_C, L)
        M_CC = tl.where(of_level(distance_CC, level), M_CC * lambda_C[:, None], M_CC)
    o_CV = tl.dot(M_CC.to(PRODUCT), v_CV)
    Z_CK = tl.load(tile(Z_BJNCK, chunk * C, K, row_C, key_K)).to(PRODUCT)
    live = tl.load(live_N + n)
    for m in range(M):
        if (number & (1 << m)) != 0:
            state = tile(states_BJSKV, (bj * LIVE + live) * K, V, key_K, value_V)
            lambda_C = load_lambda(lambda_at, 7 + m, inside_C, L)
            o_CV += tl.dot(Z_CK, tl.load(state).to(PRODUCT)) * lambda_C[:, None]
            live += 1
    o_tile = tile(o_BTJV + j * V, first, J * V, row_C, value_V)
    tl.store(o_tile, o_CV.to(o_BTJV.dtype.element_ty), inside_C[:, None])
