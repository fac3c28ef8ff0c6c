"""Queries and keys in versions (triton_tree.py), the maps that carry them, and the gradients of the
maps. Versions are made as far as a tile's documents reach."""

# Launches take keywords that the kernels' signatures do not have, and tl.range is for Triton alone.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.path_attention.triton_tiles import (
    before,
    longest_first,
    lower,
    part,
    upper,
    upto,
)
from mixtron.kernels.path_attention.triton_tree import (
    first_tile,
    key_version,
    last_tile,
    query_version,
    versions_at,
)
from mixtron.kernels.triton_tools import tile


@triton.jit(do_not_specialize=("row", "level", "tiles", "nodes"))
def node_kernel(
    maps, row, level, tiles, nodes,
    K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of the map of a level's node, from those of its children, which lie from `row` on."""
    j, row_R = part(ROWS, K)
    key_K = tl.arange(0, K)
    row += tl.program_id(1).to(tl.int64) * nodes
    left_KK = tl.load(tile(maps, (row + 2 * j) * K, K, key_K, key_K))
    right_RK = tl.load(tile(maps, (row + 2 * j + 1) * K, K, row_R, key_K))
    own = row + (tiles >> (level - 1)) + j
    map_RK = tl.dot(right_RK, left_KK)
    tl.store(tile(maps, own * K, K, row_R, key_K), map_RK.to(maps.dtype.element_ty))


@triton.jit(do_not_specialize=("T", "groups", "G", "tiles", "levels", "reach", "versions", "nodes"))
def key_version_kernel(
    k, w, beta, start_S, end_S, L, maps, XT, k_versions, T, groups, G, tiles, levels, reach,
    versions, nodes,
    K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, FINE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """X^T of a tile, and its keys carried to its right edge and on, in versions."""
    c, row_R = part(ROWS, C)
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    inside_R1 = (c * C + row_R < T)[:, None]
    own = (bg * tiles + c) * C
    w_CK = tl.load(tile(w, own, K, row_C, key_K))
    k_tile = tile(k + g * K, b * T + c * C, groups * K, row_R, key_K)
    BT_RC = tl.dot(tl.load(k_tile, inside_R1, 0.0).to(FINE), tl.trans(w_CK))
    BT_RC = tl.where(before(start_S, c * C, row_R, C, DOCUMENTS), BT_RC, 0.0).to(FINE)
    L_CC = tl.load(tile(L, own, C, row_C, row_C), lower(row_C, row_C, C), 0.0)
    XT_RC = tl.dot(BT_RC, tl.trans(L_CC))
    tl.store(tile(XT, own, C, row_R, row_C), XT_RC.to(FINE), upper(row_R, row_C, C))
    beta_C = tl.load(beta + own + row_C)
    k_RK = tl.dot((XT_RC * -beta_C[None, :]).to(FINE), w_CK)
    k_RK += tl.load(k_tile, inside_R1, 0.0).to(tl.float32)

    last = last_tile(end_S, c, tiles, C, DOCUMENTS)
    own, map_row = bg * versions, bg * nodes
    for level in range(levels):
        edge = ((c >> level) + 1) << level
        if ((c >> level) % 2 == 0) & (edge <= last):
            version = (own + key_version(c, level, reach)) * C
            out_tile = tile(k_versions, version, K, row_R, key_K)
            tl.store(out_tile, k_RK.to(k_versions.dtype.element_ty))
            if edge + (1 << level) <= last:
                map_KK = tl.load(tile(maps, (map_row + (c >> level) + 1) * K, K, key_K, key_K))
                k_RK = tl.dot(k_RK.to(FINE), tl.trans(map_KK))
        own += versions_at(level, tiles, reach)
        map_row += tiles >> level


@triton.jit(do_not_specialize=("T", "heads", "H", "tiles", "levels", "reach", "versions", "nodes"))
def query_version_kernel(
    q, k, w, beta, start_S, XT, Y, maps, logits, q_versions, scale, T, heads, H, tiles, levels,
    reach, versions, nodes,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, FINE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Of a tile of one query head its logits inside the tile, and its versions."""
    # The last tiles have most versions.
    turn, bh = longest_first()
    parts: tl.constexpr = C // ROWS
    a = tiles - 1 - turn // parts
    row_R = turn % parts * ROWS + tl.arange(0, ROWS)
    b, h = bh // H, bh % H
    g, G, groups = h // R, H // R, heads // R
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    inside_R1 = (a * C + row_R < T)[:, None]
    inside_C1 = (a * C + row_C < T)[:, None]
    first, shared = b * T + a * C, ((b * G + g) * tiles + a) * C
    q_RK = tl.load(tile(q + h * K, first, heads * K, row_R, key_K), inside_R1, 0.0)
    M_RC = tl.dot(q_RK.to(FINE), tl.trans(tl.load(tile(w, shared, K, row_C, key_K))))
    M_RC *= -tl.load(beta + shared + row_C)[None, :]
    M_RC = tl.where(upto(start_S, a * C, row_R, C, DOCUMENTS), M_RC, 0.0).to(FINE)
    k_CK = tl.load(tile(k + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0)
    logits_RC = tl.dot(q_RK.to(FINE), tl.trans(k_CK.to(FINE)))
    XT_CC = tl.load(tile(XT, shared, C, row_C, row_C), upper(row_C, row_C, C), 0.0)
    logits_RC = tl.dot(M_RC, tl.trans(XT_CC), logits_RC)
    logits_tile = tile(logits, (bh * tiles + a) * C, C, row_R, row_C)
    tl.store(logits_tile, (logits_RC * scale).to(FINE), lower(row_R, row_C, C))
    v_RK = tl.dot(M_RC, tl.load(tile(Y, shared, K, row_C, key_K)))
    v_RK = (v_RK + q_RK.to(tl.float32)) * scale

    first_a = first_tile(start_S, a, C, DOCUMENTS)
    own, map_row = bh * versions, (b * G + g) * nodes
    for level in range(levels):
        edge = (a >> level) << level
        if ((a >> level) % 2 == 1) & (first_a < edge):
            version = (own + query_version(a, level, reach)) * C
            out_tile = tile(q_versions, version, K, row_R, key_K)
            tl.store(out_tile, v_RK.to(q_versions.dtype.element_ty))
            if first_a < edge - (1 << level):
                map_KK = tl.load(tile(maps, (map_row + (a >> level) - 1) * K, K, key_K, key_K))
                v_RK = tl.dot(v_RK.to(FINE), map_KK)
        own += versions_at(level, tiles, reach)
        map_row += tiles >> level


@triton.jit(
    do_not_specialize=(
        *("H", "tiles", "level", "reach", "versions", "first", "nodes", "row", "parents"),
    )
)
def map_gradient_kernel(
    start_S, end_S, q_versions, dq_versions, k_versions, dk_versions, maps, dmaps, H, tiles, level,
    reach, versions, first, nodes, row, parents,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of the gradient of the map P of a level's node. Queries v' = v P that cross an even one
    are of its right neighbour, keys k' = k P^T that cross an odd one of its left:

        dP = sum of v^T dv' or of dk'^T k,   and what comes from the product with its sibling

    The level's versions lie from `first` on, its maps from `row` on; `parents` maps are products of
    two of them."""
    j, row_R = part(ROWS, K)
    bg = tl.program_id(1).to(tl.int64)
    G = H // R
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    even = j % 2 == 0
    begin = tl.where(even, j + 1, j - 1) << level
    end = begin + (1 << level)
    if even:
        # As far as the documents of what lies before the node.
        end = tl.minimum(end, tl.where(j > 0, tiles, 0))
        if DOCUMENTS:
            edge = tl.maximum(j << level, 1) * C
            end = tl.minimum(end, tl.cdiv(tl.load(end_S + edge - 1), C))
        own = query_version(begin, level, reach)
    else:
        edge = (j + 1) << level
        end = tl.where(edge < tiles, end, 0)
        if DOCUMENTS:
            first_c = tl.load(start_S + tl.minimum(edge, tiles - 1) * C) // C
            begin = tl.maximum(begin, first_c)
        own = key_version(begin, level, reach)
    shared = tl.where(even, R, 1)
    head = tl.where(even, bg // G * H + bg % G * R, bg)
    left = tl.where(even, q_versions, dk_versions)
    right = tl.where(even, dq_versions, k_versions)
    d_RK = tl.zeros([ROWS, K], tl.float32)
    for i in tl.range(0, tl.maximum(end - begin, 0) * shared, num_stages=STAGES):
        tile_row = ((head + i % shared) * versions + first + own + i // shared) * C
        left_CR = tl.load(tile(left, tile_row, K, row_C, row_R))
        right_CK = tl.load(tile(right, tile_row, K, row_C, key_K))
        d_RK = tl.dot(tl.trans(left_CR), right_CK, d_RK)
    row += bg * nodes
    if j // 2 < parents:
        parent = row + (tiles >> level) + j // 2
        if even:
            sibling_KR = tl.load(tile(maps, (row + j + 1) * K, K, key_K, row_R)).to(LOW)
            dparent_KK = tl.load(tile(dmaps, parent * K, K, key_K, key_K))
            d_RK = tl.dot(tl.trans(sibling_KR), dparent_KK, d_RK)
        else:
            sibling_KK = tl.load(tile(maps, (row + j - 1) * K, K, key_K, key_K)).to(LOW)
            dparent_RK = tl.load(tile(dmaps, parent * K, K, row_R, key_K))
            d_RK = tl.dot(dparent_RK, tl.trans(sibling_KK), d_RK)
    tl.store(tile(dmaps, (row + j) * K, K, row_R, key_K), d_RK.to(dmaps.dtype.element_ty))
