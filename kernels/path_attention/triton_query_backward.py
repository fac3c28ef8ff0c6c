"""The gradient of queries on a GPU: see triton_backward.py."""

# tl.range is for Triton's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from mixtron.kernels.path_attention.triton_backward import block_sum
from mixtron.kernels.path_attention.triton_forward import LOG2_E, VARYING
from mixtron.kernels.path_attention.triton_tile_gradients import query_gradient
from mixtron.kernels.path_attention.triton_tiles import longest_first, lower
from mixtron.kernels.path_attention.triton_tree import (
    first_tile,
    key_version,
    query_version,
    versions_at,
)
from mixtron.kernels.triton_tools import tile


@triton.jit(do_not_specialize=VARYING)
def query_kernel(
    q,
    k,
    v_BTGV,
    logits,
    gates,
    totals,
    start_S,
    do_BTHV,
    lse_BHS,
    delta_BHS,
    k_BTGK,
    w,
    beta,
    XT,
    Y,
    maps,
    dq,
    dq_left,
    dq_versions,
    dlogits,
    dM,
    rows_BHS,
    columns_PBHS,
    scale,
    T,
    S,
    tiles,
    levels,
    reach,
    versions,
    nodes,
    plane,
    heads,
    H,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    MAPS: tl.constexpr,
    GATE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of C queries of one head: their gradient, and with a gate the sums of ds over rows.

    With maps also that of the queries at the tile's left edge, of the logits inside the tile (and
    with a gate its sums over columns) and -dM (triton_tile_gradients.py), and in place of each
    version's own gradient that of the next one, v' = v P: dv = own + dv' P^T. Hence the way from
    the farthest keys to the nearest.
    """
    turn, bh = longest_first()
    a = tl.num_programs(0) - 1 - turn
    b, h = bh // H, bh % H
    g, G, groups = h // R, H // R, heads // R
    row_C = tl.arange(0, C)
    column = tl.arange(0, BLOCK)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    t_C = a * C + row_C
    inside_C1 = (t_C < T)[:, None]
    v = v_BTGV + b * T * groups * V + g * V
    start_C = t_C * 0
    if DOCUMENTS:
        start_C = tl.load(start_S + t_C)
    do_tile = tile(do_BTHV + h * V, b * T + a * C, heads * V, row_C, value_V)
    do_CV = tl.load(do_tile, inside_C1, 0.0).to(PRODUCT)
    lse_C = tl.load(lse_BHS + bh * S + t_C) * LOG2_E
    if GATE:
        # In all of a query's logits are the gates from its tile's left edge to it.
        lse_C -= tl.load(gates + bh * S + t_C)
    delta_C = tl.load(delta_BHS + bh * S + t_C)
    keys = k + b * T * groups * K + g * K
    if not MAPS:
        q_tile = tile(q + h * K, b * T + a * C, heads * K, row_C, key_K)
        q_CK = tl.load(q_tile, inside_C1, 0.0).to(PRODUCT)
    dq_CK = tl.zeros([C, K], tl.float32)
    sum_C = tl.zeros([C], tl.float32)
    for i in range(C // BLOCK):
        first = (a * C + i * BLOCK).to(tl.int64)
        u_B = first + column
        within_B1 = (u_B < T)[:, None]
        v_BV = tl.load(tile(v, first, groups * V, column, value_V), within_B1, 0.0).to(PRODUCT)
        if MAPS:
            pair = tile(logits + i * BLOCK, bh * S + a * C, C, row_C, column)
            below_CB = lower(row_C, i * BLOCK + column, C)
            s_CB = tl.load(pair, below_CB, 0.0).to(tl.float32) * LOG2_E
        else:
            k_BK = tl.load(tile(keys, first, groups * K, column, key_K), within_B1, 0.0).to(PRODUCT)
            s_CB = tl.dot(q_CK, tl.trans(k_BK)) * scale
        if GATE:
            s_CB -= tl.load(gates + bh * S + u_B)[None, :]
        seen_CB = (u_B[None, :] <= t_C[:, None]) & (u_B[None, :] >= start_C[:, None])
        p_CB = tl.exp2(tl.where(seen_CB, s_CB, float("-inf")) - lse_C[:, None])
        ds_CB = p_CB * (tl.dot(do_CV, tl.trans(v_BV)) - delta_C[:, None])
        sum_C += tl.sum(ds_CB, 1)
        if MAPS:
            pair = tile(dlogits + i * BLOCK, bh * S + a * C, C, row_C, column)
            tl.store(pair, ds_CB.to(dlogits.dtype.element_ty), below_CB)
            if GATE:
                tl.store(columns_PBHS + levels * plane + bh * S + u_B, tl.sum(ds_CB, 0))
        else:
            dq_CK = tl.dot(ds_CB.to(PRODUCT), k_BK, dq_CK)

    after, total = lse_BHS, lse_BHS
    low = 0 * a
    if DOCUMENTS:
        low = tl.load(start_S + a * C) // BLOCK * BLOCK
    between = tl.full([], 0.0, tl.float64)
    if GATE:
        after, total = gates + 3 * plane + bh * S, totals + bh * (S // BLOCK)
        between = block_sum(total, low // BLOCK + 1, a * (C // BLOCK))
    if MAPS:
        first_a = first_tile(start_S, a, C, DOCUMENTS)
        own, map_row = versions, nodes
        for i in range(levels):
            level = levels - 1 - i
            own -= versions_at(level, tiles, reach)
            map_row -= tiles >> level
            edge = (a >> level) << level
            before = edge - (1 << level)
            if ((a >> level) % 2 == 1) & (first_a < edge):
                version = (bh * versions + own + query_version(a, level, reach)) * C
                q_CK = tl.load(tile(q, version, K, row_C, key_K)).to(PRODUCT)
                if first_a < before:
                    dq_tile = tile(dq_versions, version, K, row_C, key_K)
                    tl.store(dq_tile, dq_CK.to(dq_versions.dtype.element_ty))
                    node = (b * G + g) * nodes + map_row + (a >> level) - 1
                    map_KK = tl.load(tile(maps, node * K, K, key_K, key_K)).to(PRODUCT)
                    dq_CK = tl.dot(dq_CK.to(PRODUCT), tl.trans(map_KK))
                row_0 = own + key_version(edge - 1, level, reach) - (edge - 1)
                keys_0 = k + ((b * G + g) * versions + row_0) * C * K
                dq_CK, sum_C, between = _walk_keys(
                    dq_CK, sum_C, between, q_CK, do_CV, lse_C, delta_C, start_C,
                    keys_0, v, after, total, tl.maximum(before * C, low), edge * C, 1.0 * LOG2_E,
                    K, groups * V, K, V, BLOCK, GATE, DOCUMENTS, PRODUCT, STAGES,
                )  # fmt: skip
        left_tile = tile(dq_left, bh * S + a * C, K, row_C, key_K)
        tl.store(left_tile, dq_CK.to(dq_left.dtype.element_ty))
        query_gradient(
            dq_CK, k_BTGK, w, beta, start_S, XT, Y, dlogits, dq, dM, scale / LOG2_E, a, bh,
            T, S, heads, H, R, K, C, PRODUCT, DOCUMENTS,
        )  # fmt: skip
    else:
        dq_CK, sum_C, between = _walk_keys(
            dq_CK, sum_C, between, q_CK, do_CV, lse_C, delta_C, start_C,
            keys, v, after, total, low, a * C, scale,
            groups * K, groups * V, K, V, BLOCK, GATE, DOCUMENTS, PRODUCT, STAGES,
        )  # fmt: skip
        dq_tile = tile(dq + h * K, b * T + a * C, heads * K, row_C, key_K)
        tl.store(dq_tile, (dq_CK * (scale / LOG2_E)).to(dq.dtype.element_ty), inside_C1)
    if GATE:
        tl.store(rows_BHS + bh * S + t_C, sum_C)


@triton.jit
def _walk_keys(
    dq_CK,
    sum_C,
    between,
    q_CK,
    do_CV,
    lse_C,
    delta_C,
    start_C,
    k,
    v,
    after,
    total,
    lo,
    hi,
    scale,
    k_row,
    v_row,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The key blocks lo .. hi, all before the queries, from the first to the last.

    `between` is the sum of the gates from block lo's right edge to the query tile's left edge. What
    is taken from it on the way is exact to fp64's precision.
    """
    column = tl.arange(0, BLOCK)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    # Only before it are keys of other documents.
    latest = tl.max(start_C, 0)
    for i in tl.range(0, (hi - lo) // BLOCK, num_stages=STAGES):
        first = (lo + i * BLOCK).to(tl.int64)
        k_BK = tl.load(tile(k, first, k_row, column, key_K)).to(PRODUCT)
        v_BV = tl.load(tile(v, first, v_row, column, value_V)).to(PRODUCT)
        s_CB = tl.dot(q_CK, tl.trans(k_BK)) * scale
        if GATE:
            s_CB += (tl.load(after + first + column) + between.to(tl.float32))[None, :]
            # Of the next block, which may be the queries' own.
            between -= tl.load(total + first // BLOCK + 1).to(tl.float64)
        if DOCUMENTS:  # noqa: SIM102 (one of the two is decided when it is compiled)
            if first < latest:
                s_CB = tl.where((first + column)[None, :] >= start_C[:, None], s_CB, float("-inf"))
        p_CB = tl.exp2(s_CB - lse_C[:, None])
        ds_CB = p_CB * (tl.dot(do_CV, tl.trans(v_BV)) - delta_C[:, None])
        if GATE:
            sum_C += tl.sum(ds_CB, 1)
        dq_CK = tl.dot(ds_CB.to(PRODUCT), k_BK, dq_CK)
    return dq_CK, sum_C, between
