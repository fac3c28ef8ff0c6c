"""Attention's forward on a GPU: a tile of queries walks over blocks of keys, from near to far.

With Householder maps the logits of a tile's own tokens are given, and queries and keys come in
versions, one for each level of the tree at which a node of earlier keys is (triton_tree.py). So all
that is T^2 is FlashAttention, with or without maps.
"""

# tl.range is for Triton's compiler alone.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from mixtron.kernels.path_attention.triton_tiles import longest_first, lower
from mixtron.kernels.path_attention.triton_tree import (
    first_tile,
    key_version,
    query_version,
    versions_at,
)
from mixtron.kernels.triton_tools import tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
VARYING = ("T", "tiles", "levels", "reach", "versions", "nodes", "heads", "H")
"""Of which no value is worth a compilation of its own. q, o and log-sum-exps have `heads` heads a
row, k and v heads / R; H and H / R of them are taken."""


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q,
    k,
    v_BTGV,
    logits,
    gates,
    totals,
    start_S,
    o_BTHV,
    lse_BHS,
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
    """A tile of C queries of one head: the output and the log-sum-exp.

    Without maps q is [B, T, H, K] and k [B, T, G, K]. With maps they are in versions,
    [B, H, versions, C, K] and [B, G, versions, C, K], and logits is [B, H, S, C].
    """
    # The last tiles see most keys.
    turn, bh = longest_first()
    a = tl.num_programs(0) - 1 - turn
    b, h = bh // H, bh % H
    g, G, groups = h // R, H // R, heads // R
    row_C = tl.arange(0, C)
    column = tl.arange(0, BLOCK)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    t_C = a * C + row_C
    inside_C = t_C < T
    v = v_BTGV + b * T * groups * V + g * V
    start_C = t_C * 0
    if DOCUMENTS:
        start_C = tl.load(start_S + t_C)
    keys = k + b * T * groups * K + g * K
    if not MAPS:
        q_tile = tile(q + h * K, b * T + a * C, heads * K, row_C, key_K)
        q_CK = tl.load(q_tile, inside_C[:, None], 0.0).to(PRODUCT)
    # Not -inf: a row may have no key in the first block.
    top_C = tl.full([C], -1e30, tl.float32)
    sum_C = tl.zeros([C], tl.float32)
    acc_CV = tl.zeros([C, V], tl.float32)
    for i in range(C // BLOCK):
        first = (a * C + i * BLOCK).to(tl.int64)
        u_B = first + column
        within_B1 = (u_B < T)[:, None]
        if MAPS:
            pair = tile(logits + i * BLOCK, bh * S + a * C, C, row_C, column)
            below_CB = lower(row_C, i * BLOCK + column, C)
            s_CB = tl.load(pair, below_CB, 0.0).to(tl.float32) * LOG2_E
        else:
            k_BK = tl.load(tile(keys, first, groups * K, column, key_K), within_B1, 0.0)
            s_CB = tl.dot(q_CK, tl.trans(k_BK.to(PRODUCT))) * scale
        if GATE:
            s_CB -= tl.load(gates + bh * S + u_B)[None, :]
        seen_CB = (u_B[None, :] <= t_C[:, None]) & (u_B[None, :] >= start_C[:, None])
        s_CB = tl.where(seen_CB, s_CB, float("-inf"))
        v_BV = tl.load(tile(v, first, groups * V, column, value_V), within_B1, 0.0).to(PRODUCT)
        acc_CV, top_C, sum_C = _add(acc_CV, top_C, sum_C, s_CB, v_BV)

    after, total = lse_BHS, lse_BHS
    if GATE:
        after, total = gates + 3 * plane + bh * S, totals + bh * (S // BLOCK)
    low = 0 * a
    if DOCUMENTS:
        low = tl.load(start_S + a * C) // BLOCK * BLOCK
    between = tl.full([], 0.0, tl.float32)
    if MAPS:
        first_a = first_tile(start_S, a, C, DOCUMENTS)
        own = 0 * a
        for level in range(levels):
            edge = (a >> level) << level
            if ((a >> level) % 2 == 1) & (first_a < edge):
                version = own + query_version(a, level, reach)
                q_tile = tile(q, (bh * versions + version) * C, K, row_C, key_K)
                before = edge - (1 << level)
                row_0 = own + key_version(edge - 1, level, reach) - (edge - 1)
                keys_0 = k + ((b * G + g) * versions + row_0) * C * K
                acc_CV, top_C, sum_C, between = _walk_keys(
                    acc_CV, top_C, sum_C, between, tl.load(q_tile).to(PRODUCT), start_C, keys_0,
                    v, after, total, tl.maximum(before * C, low), edge * C, 1.0 * LOG2_E,
                    K, groups * V, K, V, BLOCK, GATE, DOCUMENTS, PRODUCT, STAGES,
                )  # fmt: skip
            own += versions_at(level, tiles, reach)
    else:
        acc_CV, top_C, sum_C, between = _walk_keys(
            acc_CV, top_C, sum_C, between, q_CK, start_C, keys, v, after, total,
            low, a * C, scale,
            groups * K, groups * V, K, V, BLOCK, GATE, DOCUMENTS, PRODUCT, STAGES,
        )  # fmt: skip
    o_tile = tile(o_BTHV + h * V, b * T + a * C, heads * V, row_C, value_V)
    o_CV = acc_CV / sum_C[:, None]
    tl.store(o_tile, o_CV.to(o_BTHV.dtype.element_ty), inside_C[:, None])
    if GATE:
        # The gates from its tile's left edge to a query are in all of its logits: added once.
        top_C += tl.load(gates + bh * S + t_C)
    tl.store(lse_BHS + bh * S + t_C, top_C * LN_2 + tl.log(sum_C))


@triton.jit
def _walk_keys(
    acc_CV,
    top_C,
    sum_C,
    between,
    q_CK,
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
    """The key blocks lo .. hi, all before the queries, from the last to the first.

    `between` is the sum of the gates from a key block's right edge to the query tile's left edge:
    added up on the way, it never is a difference.
    """
    column = tl.arange(0, BLOCK)
    key_K = tl.arange(0, K)
    value_V = tl.arange(0, V)
    # Only before it are keys of other documents.
    latest = tl.max(start_C, 0)
    for i in tl.range(0, (hi - lo) // BLOCK, num_stages=STAGES):
        first = (hi - (i + 1) * BLOCK).to(tl.int64)
        k_BK = tl.load(tile(k, first, k_row, column, key_K)).to(PRODUCT)
        v_BV = tl.load(tile(v, first, v_row, column, value_V)).to(PRODUCT)
        s_CB = tl.dot(q_CK, tl.trans(k_BK)) * scale
        if GATE:
            s_CB += (tl.load(after + first + column) + between)[None, :]
            between += tl.load(total + first // BLOCK)
        if DOCUMENTS:  # noqa: SIM102 (one of the two is decided when it is compiled)
            if first < latest:
                s_CB = tl.where((first + column)[None, :] >= start_C[:, None], s_CB, float("-inf"))
        acc_CV, top_C, sum_C = _add(acc_CV, top_C, sum_C, s_CB, v_BV)
    return acc_CV, top_C, sum_C, between


@triton.jit
def _add(acc_CV, top_C, sum_C, s_CB, v_BV):
    """One block of logits, in units of log 2, and values into the running softmax."""
    new_C = tl.maximum(top_C, tl.max(s_CB, 1))
    p_CB = tl.exp2(s_CB - new_C[:, None])
    shrink_C = tl.exp2(top_C - new_C)
    sum_C = sum_C * shrink_C + tl.sum(p_CB, 1)
    acc_CV = tl.dot(p_CB.to(v_BV.dtype), v_BV, acc_CV * shrink_C[:, None])
    return acc_CV, new_C, sum_C
