"""Log-linear attention on the gated linear base, backward on a GPU: what is read of every node, the
nodes' gradients down the tree, then every other gradient chunk by chunk. The equations are in
README.md, the tables in `triton_plan.py`.
"""

# Loads have no type outside of a kernel.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.log_linear_attention.triton_forward import level_weights, load_chunk, of_level
from mixtron.kernels.triton_tools import tile


@triton.jit(do_not_specialize=["T", "N", "M"])
def log_linear_parts_kernel(
    q_BTHK,
    do_BTJV,
    lambda_BTJL,
    chunk_N4,
    part_P4,
    cumulative_BJNC,
    before_BJMN,
    parts_BJPKV,
    scale,
    T,
    N,
    M,
    L: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """The gradient of one node by some of the chunks that read it, fp32."""
    p = tl.program_id(0)
    P = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK_V
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, BLOCK_V)
    m = tl.load(part_P4 + p * 4)
    from_chunk = tl.load(part_P4 + p * 4 + 1)
    count = tl.load(part_P4 + p * 4 + 2)
    head = (j // (J // H)) * K
    value = j * V + column
    part_KV = tl.zeros([K, BLOCK_V], tl.float32)
    for n in range(from_chunk, from_chunk + count):
        first, begin, end, _ = load_chunk(chunk_N4, n)
        first += b * T
        inside_C = (row_C >= begin) & (row_C < end)
        inside_C1 = inside_C[:, None]
        q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0)
        do_CV = tl.load(tile(do_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0)
        lambda_at = lambda_BTJL + ((first + row_C) * J + j) * L + 7 + m
        lambda_C = tl.load(lambda_at, inside_C, 0.0).to(tl.float32)
        G_C = tl.load(cumulative_BJNC + (bj * N + n) * C + row_C)
        between = tl.load(before_BJMN + (bj * M + m) * N + n)
        read_C = lambda_C * tl.exp(G_C + between) * scale
        read_CV = (do_CV.to(tl.float32) * read_C[:, None]).to(PRODUCT)
        part_KV = tl.dot(tl.trans(q_CK.to(PRODUCT)), read_CV, part_KV)
    tl.store(tile(parts_BJPKV + column, (bj * P + p) * K, V, key_K, value_V), part_KV)


@triton.jit(do_not_specialize=["N", "S", "M", "P"])
def log_linear_push_kernel(
    parts_BJPE,
    low_BJSE,
    cumulative_BJNC,
    before_BJMN,
    node_S4,
    stretch_R2,
    dtree_BJSE,
    merged_QBJS,
    N,
    S,
    M,
    P,
    C: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of all nodes, from the last to the first: by what is read of a node, and by the
    node that it becomes part of. And what a share of BLOCK entries gives to the gradient of the log
    decay between the two."""
    bj = tl.program_id(1).to(tl.int64)
    BJ = tl.num_programs(1)
    entry_E = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stretch = stretch_R2 + tl.program_id(2) * 2
    begin, end = tl.load(stretch), tl.load(stretch + 1)
    # The nodes before the first document's chunks come last.
    steps = end - begin + tl.where(begin == 0, S - N, 0)
    for step in range(steps):
        slot = tl.where(step < end - begin, end - 1 - step, N + step - (end - begin))
        m = tl.load(node_S4 + slot * 4)
        parent = tl.load(node_S4 + slot * 4 + 1)
        part = tl.load(node_S4 + slot * 4 + 2)
        count = tl.load(node_S4 + slot * 4 + 3)
        dnode_E = tl.zeros([BLOCK], tl.float32)
        for p in range(part, part + count):
            dnode_E += tl.load(parts_BJPE + (bj * P + p) * E + entry_E)
        merged = 0.0
        if parent >= 0:
            between = tl.load(cumulative_BJNC + (bj * N + parent) * C + C - 1)
            between += tl.load(before_BJMN + (bj * M + m) * N + parent)
            dparent_E = tl.load(dtree_BJSE + (bj * S + parent) * E + entry_E)
            dparent_E = dparent_E * tl.exp(between)
            node_E = tl.load(low_BJSE + (bj * S + slot) * E + entry_E).to(tl.float32)
            merged = tl.sum(dparent_E * node_E, 0)
            dnode_E += dparent_E
        tl.store(dtree_BJSE + (bj * S + slot) * E + entry_E, dnode_E)
        tl.store(merged_QBJS + (tl.program_id(0) * BJ + bj) * S + slot, merged)
        # The nodes that it contains need this one's gradient.
        tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "S", "M"])
def log_linear_gradient_kernel(
    q_BTHK,
    k_BTHK,
    v_BTJV,
    do_BTJV,
    lambda_BTJL,
    chunk_N4,
    cumulative_BJNC,
    before_BJMN,
    low_BJSKV,
    dtree_BJSKV,
    dq_BTJK,
    dk_BTJK,
    dv_BTJV,
    dlambda_BTJL,
    dlog_decay_BTJ,
    read_BJMN,
    scale,
    T,
    S,
    M,
    L: tl.constexpr,
    H: tl.constexpr,
    J: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Of one chunk and value head: the gradients of q, k, v and lambda, the log decay's by what
    begins or ends in the chunk, and what it reads of each node times the gradient of that.

    Transposed scores are products of their own: transposing an accumulator has gone wrong on
    Hopper."""
    n = tl.program_id(0)
    N = tl.num_programs(0)
    bj = tl.program_id(1).to(tl.int64)
    b, j = bj // J, bj % J
    row_C = tl.arange(0, C)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    first, begin, end, number = load_chunk(chunk_N4, n)
    first += b * T
    inside_C = (row_C >= begin) & (row_C < end)
    inside_C1 = inside_C[:, None]
    head = (j // (J // H)) * K
    value = j * V
    q_CK = tl.load(tile(q_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    k_CK = tl.load(tile(k_BTHK + head, first, H * K, row_C, key_K), inside_C1, 0.0).to(PRODUCT)
    v_CV = tl.load(tile(v_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
    do_CV = tl.load(tile(do_BTJV + value, first, J * V, row_C, value_V), inside_C1, 0.0).to(PRODUCT)
    G_C = tl.load(cumulative_BJNC + (bj * N + n) * C + row_C)
    first_level_C = ((first + row_C) * J + j) * L

    # The nodes before it.
    dq_CK = tl.zeros([C, K], tl.float32)
    dG_C = tl.zeros([C], tl.float32)
    for m in range(M):
        size = 1 << m
        read = 0.0
        dlambda_C = tl.zeros([C], tl.float32)
        if (number & size) != 0:
            before = n - (number & (size - 1)) - 1
            slot = tl.where(before < 0, N + m, before)
            node_KV = tl.load(tile(low_BJSKV, (bj * S + slot) * K, V, key_K, value_V)).to(PRODUCT)
            between = tl.load(before_BJMN + (bj * M + m) * N + n)
            lambda_C = tl.load(lambda_BTJL + first_level_C + 7 + m, inside_C, 0.0).to(tl.float32)
            dread_CK = tl.dot(do_CV, tl.trans(node_KV)) * (tl.exp(G_C + between) * scale)[:, None]
            dlambda_C = tl.sum(dread_CK * q_CK.to(tl.float32), 1)
            dq_CK += dread_CK * lambda_C[:, None]
            dG_C += dlambda_C * lambda_C
            read = tl.sum(dlambda_C * lambda_C, 0)
        tl.store(read_BJMN + (bj * M + m) * N + n, read)
        tl.store(dlambda_BTJL + first_level_C + 7 + m, dlambda_C, inside_C & (7 + m < L))

    # Its own tokens.
    distance_CC = row_C[:, None] ^ row_C[None, :]
    upto_CC = row_C[:, None] >= row_C[None, :]
    decay_CC = tl.exp(tl.where(upto_CC, G_C[:, None] - G_C[None, :], float("-inf"))) * scale
    weight_CC = level_weights(lambda_BTJL, row_C, inside_C, first_level_C, L, C)
    dP_CC = tl.dot(do_CV, tl.trans(v_CV)) * decay_CC
    seen_CC = tl.dot(q_CK, tl.trans(k_CK)) * dP_CC
    for level in tl.static_range(0, 7):
        if level < L:
            dlambda_C = tl.sum(tl.where(of_level(distance_CC, level), seen_CC, 0.0), 1)
            tl.store(dlambda_BTJL + first_level_C + level, dlambda_C, inside_C)
    seen_CC = seen_CC * weight_CC
    dG_C += tl.sum(seen_CC, 1) - tl.sum(seen_CC, 0)
    dq_CK = tl.dot((dP_CC * weight_CC).to(PRODUCT), k_CK, dq_CK)
    dq_tile = tile(dq_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dq_tile, dq_CK.to(dq_BTJK.dtype.element_ty), inside_C1)

    # What it writes, and its own tokens as keys.
    dnode_KV = tl.load(tile(dtree_BJSKV, (bj * S + n) * K, V, key_K, value_V)).to(PRODUCT)
    total = tl.load(cumulative_BJNC + (bj * N + n) * C + C - 1)
    to_end_C1 = tl.exp(total - G_C)[:, None]
    after_CC = tl.trans(decay_CC * weight_CC)
    dv_CV = tl.dot(k_CK, dnode_KV) * to_end_C1
    kept_C = tl.sum(dv_CV * v_CV.to(tl.float32), 1)
    P_CC = tl.dot(k_CK, tl.trans(q_CK)) * after_CC
    dv_CV = tl.dot(P_CC.to(PRODUCT), do_CV, dv_CV)
    dv_tile = tile(dv_BTJV + value, first, J * V, row_C, value_V)
    tl.store(dv_tile, dv_CV.to(dv_BTJV.dtype.element_ty), inside_C1)
    dk_CK = tl.dot(v_CV, tl.trans(dnode_KV)) * to_end_C1
    dP_CC = tl.dot(v_CV, tl.trans(do_CV)) * after_CC
    dk_CK = tl.dot(dP_CC.to(PRODUCT), q_CK, dk_CK)
    dk_tile = tile(dk_BTJK + j * K, first, J * K, row_C, key_K)
    tl.store(dk_tile, dk_CK.to(dk_BTJK.dtype.element_ty), inside_C1)

    dG_C += tl.where(row_C == C - 1, tl.sum(kept_C, 0), 0.0) - kept_C
    dg_C = tl.sum(tl.where(upto_CC, dG_C[:, None], 0.0), 0)
    tl.store(dlog_decay_BTJ + (first + row_C) * J + j, dg_C, inside_C)
