"""Attention's backward on a GPU, without atomics: a kernel that owns tiles of keys and walks over
queries, and one that owns tiles of queries and walks over keys (triton_query_backward.py). Tiles,
nodes and versions are those of triton_forward.py.

    p = exp(logit - lse),   ds = p (do . v - delta),   delta = rowsum(do o)
    dv = p^T do,   dk = ds^T q,   dq = ds k

The gate's gradient is left as the sums of ds over rows and over columns: both kernels compute the
same ds, so their running difference is what lies across a token (triton_gates.py).
"""

# tl.range is for Triton's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from mixtron.kernels.path_attention.triton_forward import LOG2_E, VARYING
from mixtron.kernels.path_attention.triton_tiles import longest_first, lower
from mixtron.kernels.path_attention.triton_tree import (
    key_version,
    last_tile,
    query_version,
    versions_at,
)
from mixtron.kernels.triton_tools import tile


@triton.jit(do_not_specialize=("T", "H"))
def delta_kernel(
    o_BTHV, do_BTHV, lse_BHS, until_BHS, delta_BHS, less_BHS, T, S, H,
    V: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """rowsum(do o) of a tile of rows of one head; and what is taken from their logits, in units of
    log 2: the log-sum-exp, less the gates from each row's block's left edge to it."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    row_C = tl.arange(0, C)
    value_V = tl.arange(0, V)
    t_C = tl.program_id(0) * C + row_C
    inside_C1 = (t_C < T)[:, None]
    first = b * T + tl.program_id(0) * C
    o_CV = tl.load(tile(o_BTHV + h * V, first, H * V, row_C, value_V), inside_C1, 0.0)
    do_CV = tl.load(tile(do_BTHV + h * V, first, H * V, row_C, value_V), inside_C1, 0.0)
    tl.store(delta_BHS + bh * S + t_C, tl.sum(o_CV.to(tl.float32) * do_CV.to(tl.float32), 1))
    less_C = tl.load(lse_BHS + bh * S + t_C) * LOG2_E
    if GATE:
        less_C -= tl.load(until_BHS + bh * S + t_C)
    tl.store(less_BHS + bh * S + t_C, less_C)


@triton.jit(do_not_specialize=VARYING)
def key_kernel(
    q,
    k,
    v_BTGV,
    logits,
    gates,
    totals,
    start_S,
    end_S,
    maps,
    do_BTHV,
    lse_BHS,
    delta_BHS,
    less_BHS,
    dk,
    dk_versions,
    dv_BTGV,
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
    """A tile of C keys of one key/value head, over all query heads that read it: the gradients of
    keys and values, and with a gate the sums of ds over each key's column.

    With maps these come in parts, one for each level (and one inside the tile, from the other
    kernel). The gradient is that of the keys at their tile's right edge, and in place of each
    version's own gradient stands that of the next one, k' = k P^T: dk = own + dk' P."""
    a, bg = longest_first()
    G, groups = H // R, heads // R
    b, g = bg // G, bg % G
    row_C = tl.arange(0, C)
    column = tl.arange(0, BLOCK)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    u_C = a * C + row_C
    inside_C1 = (u_C < T)[:, None]
    v_tile = tile(v_BTGV + g * V, b * T + a * C, groups * V, row_C, value_V)
    v_CV = tl.load(v_tile, inside_C1, 0.0).to(PRODUCT)
    end = tl.cdiv(T, BLOCK) * BLOCK
    # Only from its end on are queries of another document than the first key's.
    own_end = end
    if DOCUMENTS:
        own_end = tl.load(end_S + tl.minimum(a * C, T - 1))
        end = tl.load(end_S + tl.minimum(a * C + C, T) - 1)
        end = tl.cdiv(end, BLOCK) * BLOCK
    dk_CK = tl.zeros([C, K], tl.float32)
    dv_CV = tl.zeros([C, V], tl.float32)
    if MAPS:
        last = last_tile(end_S, a, tiles, C, DOCUMENTS)
        own, map_row = versions, nodes
        for i in range(levels):
            level = levels - 1 - i
            own -= versions_at(level, tiles, reach)
            map_row -= tiles >> level
            edge = ((a >> level) + 1) << level
            behind = edge + (1 << level)
            if ((a >> level) % 2 == 0) & (edge <= last):
                version = (bg * versions + own + key_version(a, level, reach)) * C
                k_CK = tl.load(tile(k, version, K, row_C, key_K)).to(PRODUCT)
                if behind <= last:
                    dk_tile = tile(dk_versions, version, K, row_C, key_K)
                    tl.store(dk_tile, dk_CK.to(dk_versions.dtype.element_ty))
                    node = (bg * nodes + map_row + (a >> level) + 1) * K
                    map_KK = tl.load(tile(maps, node, K, key_K, key_K)).to(PRODUCT)
                    dk_CK = tl.dot(dk_CK.to(PRODUCT), map_KK)
                for r in range(R):
                    h = g * R + r
                    bh = b * H + h
                    queries = bh * versions + own + query_version(edge, level, reach)
                    total = less_BHS
                    after_C = tl.zeros([C], tl.float32)
                    between = tl.full([], 0.0, tl.float32)
                    if GATE:
                        after_C = tl.load(gates + plane + bh * S + u_C)
                        total = totals + bh * (S // BLOCK)
                        between = block_sum(total, (a + 1) * (C // BLOCK), edge * (C // BLOCK))
                        between = between.to(tl.float32)
                    dk_CK, dv_CV, column_C = _walk_queries(
                        dk_CK, dv_CV, tl.zeros([C], tl.float32), between, k_CK, v_CV, after_C, u_C,
                        q + queries * C * K, do_BTHV + (b * T * heads + h) * V,
                        less_BHS + bh * S, delta_BHS + bh * S, total, start_S, own_end,
                        edge * C, tl.minimum(behind * C, end), T, 1.0 * LOG2_E,
                        K, heads * V, K, V, BLOCK, GATE, DOCUMENTS, PRODUCT, STAGES,
                    )  # fmt: skip
                    if GATE:
                        tl.store(columns_PBHS + level * plane + bh * S + u_C, column_C)
            elif GATE:
                for r in range(R):
                    columns = columns_PBHS + level * plane + (b * H + g * R + r) * S
                    tl.store(columns + u_C, tl.zeros([C], tl.float32))
    else:
        k_tile = tile(k + g * K, b * T + a * C, groups * K, row_C, key_K)
        k_CK = tl.load(k_tile, inside_C1, 0.0).to(PRODUCT)
    for r in range(R):
        h = g * R + r
        bh = b * H + h
        do = do_BTHV + b * T * heads * V + h * V
        total = less_BHS
        after_C = tl.zeros([C], tl.float32)
        own_C = tl.zeros([C], tl.float32)
        if GATE:
            own_C = tl.load(gates + bh * S + u_C)
            after_C = tl.load(gates + plane + bh * S + u_C)
            total = totals + bh * (S // BLOCK)
        column_C = tl.zeros([C], tl.float32)
        for i in range(C // BLOCK):
            first = (a * C + i * BLOCK).to(tl.int64)
            t_B = first + column
            within_B1 = (t_B < T)[:, None]
            do_BV = tl.load(tile(do, first, heads * V, column, value_V), within_B1, 0.0).to(PRODUCT)
            if MAPS:
                below_BC = lower(i * BLOCK + column, row_C, C)
                s_BC = tl.load(tile(logits, bh * S + first, C, column, row_C), below_BC, 0.0)
                s_CB = tl.trans(s_BC).to(tl.float32) * LOG2_E
            else:
                q_tile = tile(q + h * K, b * T + first, heads * K, column, key_K)
                q_BK = tl.load(q_tile, within_B1, 0.0).to(PRODUCT)
                s_CB = tl.dot(k_CK, tl.trans(q_BK)) * scale
            if GATE:
                s_CB += tl.load(gates + bh * S + t_B)[None, :] - own_C[:, None]
            seen_CB = u_C[:, None] <= t_B[None, :]
            if DOCUMENTS:
                seen_CB = seen_CB & (u_C[:, None] >= tl.load(start_S + t_B)[None, :])
            s_CB = tl.where(seen_CB, s_CB, float("-inf"))
            lse_B = tl.load(lse_BHS + bh * S + t_B) * LOG2_E
            delta_B = tl.load(delta_BHS + bh * S + t_B)
            p_CB = tl.exp2(s_CB - lse_B[None, :])
            dv_CV = tl.dot(p_CB.to(PRODUCT), do_BV, dv_CV)
            if not MAPS:
                ds_CB = p_CB * (tl.dot(v_CV, tl.trans(do_BV)) - delta_B[None, :])
                column_C += tl.sum(ds_CB, 1)
                dk_CK = tl.dot(ds_CB.to(PRODUCT), q_BK, dk_CK)
        if not MAPS:
            lo = (a + 1) * C
            dk_CK, dv_CV, column_C = _walk_queries(
                dk_CK, dv_CV, column_C, tl.full([], 0.0, tl.float32), k_CK, v_CV, after_C, u_C,
                q + h * K + (b * T + lo) * heads * K, do, less_BHS + bh * S, delta_BHS + bh * S,
                total, start_S, own_end, lo, end, T, scale,
                heads * K, heads * V, K, V, BLOCK, GATE, DOCUMENTS, PRODUCT, STAGES,
            )  # fmt: skip
            if GATE:
                tl.store(columns_PBHS + bh * S + u_C, column_C)

    if MAPS:
        tl.store(tile(dk, bg * S + a * C, K, row_C, key_K), dk_CK.to(dk.dtype.element_ty))
    else:
        dk_tile = tile(dk + g * K, b * T + a * C, groups * K, row_C, key_K)
        # The walk's scale is in units of log 2.
        tl.store(dk_tile, (dk_CK * (scale / LOG2_E)).to(dk.dtype.element_ty), inside_C1)
    dv_tile = tile(dv_BTGV + g * V, b * T + a * C, groups * V, row_C, value_V)
    tl.store(dv_tile, dv_CV.to(dv_BTGV.dtype.element_ty), inside_C1)


@triton.jit
def _walk_queries(
    dk_CK,
    dv_CV,
    column_C,
    between,
    k_CK,
    v_CV,
    after_C,
    u_C,
    q,
    do,
    less,
    delta,
    total,
    start_S,
    own_end,
    lo,
    hi,
    T,
    scale,
    q_row,
    do_row,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The query blocks lo .. hi, all behind the keys; q points to row lo."""
    column = tl.arange(0, BLOCK)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    for i in tl.range(0, (hi - lo) // BLOCK, num_stages=STAGES):
        first = (lo + i * BLOCK).to(tl.int64)
        t_B = first + column
        within_B1 = (t_B < T)[:, None]
        # Zero, but not to the compiler, which would make offsets before the loop and spill them.
        row_B = column + (i >> 30)
        q_BK = tl.load(tile(q, first - lo, q_row, row_B, key_K), within_B1, 0.0).to(PRODUCT)
        do_BV = tl.load(tile(do, first, do_row, row_B, value_V), within_B1, 0.0).to(PRODUCT)
        s_CB = tl.dot(k_CK, tl.trans(q_BK)) * scale
        if GATE:
            s_CB += after_C[:, None]
        if DOCUMENTS:  # noqa: SIM102 (one of the two is decided when it is compiled)
            if first + BLOCK > own_end:
                seen_CB = u_C[:, None] >= tl.load(start_S + t_B)[None, :]
                s_CB = tl.where(seen_CB, s_CB, float("-inf"))
        less_B = tl.load(less + t_B)
        if GATE:
            less_B -= between
            between += tl.load(total + first // BLOCK)
        p_CB = tl.exp2(s_CB - less_B[None, :])
        dv_CV = tl.dot(p_CB.to(PRODUCT), do_BV, dv_CV)
        ds_CB = p_CB * (tl.dot(v_CV, tl.trans(do_BV)) - tl.load(delta + t_B)[None, :])
        if GATE:
            column_C += tl.sum(ds_CB, 1)
        dk_CK = tl.dot(ds_CB.to(PRODUCT), q_BK, dk_CK)
    return dk_CK, dv_CV, column_C


@triton.jit
def block_sum(x, first, end):
    """x[first .. end] in fp64."""
    lane = tl.arange(0, 256)
    sum_x = tl.zeros([256], tl.float64)
    for i in range(first, end, 256):
        sum_x += tl.load(x + i + lane, i + lane < end, 0.0).to(tl.float64)
    return tl.sum(sum_x, 0)
