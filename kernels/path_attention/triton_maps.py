"""Queries and keys carried over maps, and the gradients.

A tile of queries has versions: v_{t-1} = q at the left edge of its tile t, v_{b-1} = v_b P_b, of
which v_b meets the keys that are carried to the right edge of tile b. These are the earlier tiles
of its span; from the span's left edge the same goes on over the maps of earlier spans. Versions are
made as far as the tile's documents reach.

The pairs t > b of a sequence of blocks, those with t - b <= lags alone, lie in the order (1, 0),
(2, 0), ... (2, 1), (3, 1), ...: what meets the keys of a block is in one piece.
"""

# Launches take keywords that the kernels' signatures do not have, and tl.range is for Triton alone.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from mixtron.kernels.path_attention.triton_tiles import longest_first, part, upto
from mixtron.kernels.triton_tools import tile

VARYING = ("T", "heads", "H", "span_tiles", "lags", "blocks", "tiles")
"""Of which no value is worth a compilation of its own."""


def pairs_before(b: int, blocks: int, lags: int) -> int:
    """The number of pairs whose earlier block is before b: where b's own begin. lags < blocks."""
    fewer = max(0, b - (blocks - 1 - lags))
    return b * lags - fewer * (fewer - 1) // 2


@triton.jit
def first_pair(b, blocks, lags):
    """`pairs_before` on the device."""
    fewer = tl.maximum(b - (blocks - 1 - lags), 0)
    return b * lags - fewer * (fewer - 1) // 2


@triton.jit
def reach(start_S, a, span_tiles, lags, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """How many earlier tiles of its span, and how many earlier spans, tile a has keys in."""
    first = 0 * a
    if DOCUMENTS:
        first = tl.load(start_S + a * C) // C
    span = a // span_tiles
    near = tl.minimum(a % span_tiles, a - first)
    far = tl.minimum(tl.minimum(span, lags), span - first // span_tiles)
    return near, far


@triton.jit
def near_row(bh, a, u, S, span_tiles, C: tl.constexpr):
    """Where tile a's version begins that meets tile u of its span."""
    span, t = a // span_tiles, a % span_tiles
    pairs = span_tiles * (span_tiles - 1) // 2
    pair = (bh * (S // (span_tiles * C)) + span) * pairs + first_pair(u, span_tiles, span_tiles - 1)
    return (pair + t - u - 1) * C


@triton.jit
def far_row(bh, a, m, S, span_tiles, lags, C: tl.constexpr):
    """Where tile a's version begins that meets span m."""
    spans = S // (span_tiles * C)
    pair = bh * first_pair(spans - 1, spans, lags) + first_pair(m, spans, lags)
    return ((pair + a // span_tiles - m - 1) * span_tiles + a % span_tiles) * C


@triton.jit(do_not_specialize=VARYING)
def span_kernel(
    maps, k_exact, to_end, span_maps, k_far, S, span_tiles,
    K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """P_{L-1} ... P_{t+1} for every tile t of a span, all of them, and keys to the span's right
    edge: rows of the maps, columns of the keys."""
    m, row_R = part(ROWS, K)
    bg = tl.program_id(1).to(tl.int64)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    product_RK = tl.where(row_R[:, None] == key_K[None, :], 1.0, 0.0).to(FINE)
    for i in range(span_tiles):
        n = bg * (S // C) + (m + 1) * span_tiles - 1 - i
        tl.store(tile(to_end, n * K, K, row_R, key_K), product_RK)
        k_CR = tl.dot(tl.load(tile(k_exact, n * C, K, row_C, key_K)), tl.trans(product_RK))
        tl.store(tile(k_far, n * C, K, row_C, row_R), k_CR.to(k_far.dtype.element_ty))
        map_KK = tl.load(tile(maps, n * K, K, key_K, key_K))
        product_RK = tl.dot(product_RK, map_KK).to(FINE)
    span_row = (bg * (S // (span_tiles * C)) + m) * K
    tl.store(tile(span_maps, span_row, K, row_R, key_K), product_RK)


@triton.jit(do_not_specialize=VARYING)
def version_kernel(
    q, k, w, beta, start_S, XT, Y, maps, span_maps, logits, q_near, q_far, scale, T, S,
    heads, H, span_tiles, lags,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, FINE: tl.constexpr,
    DOCUMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of a tile of one query head its logits inside the tile, and its versions."""
    # The last tiles have most versions.
    turn, bh = longest_first()
    parts: tl.constexpr = C // ROWS
    a = tl.num_programs(0) // parts - 1 - turn // parts
    row_R = turn % parts * ROWS + tl.arange(0, ROWS)
    b, h = bh // H, bh % H
    g, G, groups = h // R, H // R, heads // R
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    inside_R1 = (a * C + row_R < T)[:, None]
    inside_C1 = (a * C + row_C < T)[:, None]
    first, own, shared = b * T + a * C, bh * S + a * C, (b * G + g) * S + a * C
    q_RK = tl.load(tile(q + h * K, first, heads * K, row_R, key_K), inside_R1, 0.0)
    M_RC = tl.dot(q_RK.to(FINE), tl.trans(tl.load(tile(w, shared, K, row_C, key_K))))
    M_RC *= -tl.load(beta + shared + row_C)[None, :]
    M_RC = tl.where(upto(start_S, a * C, row_R, C, DOCUMENTS), M_RC, 0.0).to(FINE)
    k_CK = tl.load(tile(k + g * K, first, groups * K, row_C, key_K), inside_C1, 0.0)
    logits_RC = tl.dot(q_RK.to(FINE), tl.trans(k_CK.to(FINE)))
    XT_CC = tl.load(tile(XT, shared, C, row_C, row_C))
    logits_RC = tl.dot(M_RC, tl.trans(XT_CC), logits_RC)
    tl.store(tile(logits, own, C, row_R, row_C), (logits_RC * scale).to(FINE))
    v_RK = tl.dot(M_RC, tl.load(tile(Y, shared, K, row_C, key_K)))
    v_RK = (v_RK + q_RK.to(tl.float32)) * scale

    near, far = reach(start_S, a, span_tiles, lags, C, DOCUMENTS)
    span, t = a // span_tiles, a % span_tiles
    map_row = ((b * G + g) * (S // C) + a - 1) * K
    for i in tl.range(0, near, num_stages=STAGES):
        own = near_row(bh, a, t - 1 - i, S, span_tiles, C)
        out_tile = tile(q_near, own, K, row_R, key_K)
        tl.store(out_tile, v_RK.to(q_near.dtype.element_ty))
        map_KK = tl.load(tile(maps, map_row - i * K, K, key_K, key_K))
        v_RK = tl.dot(v_RK.to(FINE), map_KK)
    map_row = ((b * G + g) * (S // (span_tiles * C)) + span - 1) * K
    for i in tl.range(0, far, num_stages=STAGES):
        own = far_row(bh, a, span - 1 - i, S, span_tiles, lags, C)
        out_tile = tile(q_far, own, K, row_R, key_K)
        tl.store(out_tile, v_RK.to(q_far.dtype.element_ty))
        map_KK = tl.load(tile(span_maps, map_row - i * K, K, key_K, key_K))
        v_RK = tl.dot(v_RK.to(FINE), map_KK)


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


@triton.jit(do_not_specialize=VARYING)
def map_gradient_kernel(
    end_S, versions, dversions, to_end, dproducts, dmaps, H, blocks, tiles, lags,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dP_b = sum over later blocks t of v_b^T dv_{b-1}, over all their tiles and the query heads
    that share it; and of a tile what comes from the products to its span's right edge. A sequence
    has so many blocks, of so many tiles each."""
    G = H // R
    b = tl.program_id(0) % blocks
    sequence = tl.program_id(0) // blocks
    sequences = tl.num_programs(0) // blocks
    bg = tl.program_id(1).to(tl.int64)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    count = (tl.minimum(blocks, b + lags + 1) - b - 1) * tiles
    if DOCUMENTS:
        edge = (sequence * blocks + b + 1) * tiles * C
        count = tl.minimum(count, tl.cdiv(tl.load(end_S + edge - 1) - edge, C))
    dmap_KK = tl.zeros([K, K], tl.float32)
    pairs, own = first_pair(blocks - 1, blocks, lags), first_pair(b, blocks, lags)
    for i in tl.range(0, tl.maximum(count, 0) * R, num_stages=STAGES):
        bh = bg // G * H + bg % G * R + i % R
        row = (((bh * sequences + sequence) * pairs + own) * tiles + i // R) * C
        v_CK = tl.load(tile(versions, row, K, row_C, key_K))
        dv_CK = tl.load(tile(dversions, row, K, row_C, key_K))
        dmap_KK = tl.dot(tl.trans(v_CK), dv_CK, dmap_KK)
    dmap_row = (bg * tl.num_programs(0) + tl.program_id(0)) * K
    if to_end is not None:
        behind_KK = tl.load(tile(to_end, dmap_row, K, key_K, key_K)).to(LOW)
        d_KK = tl.load(tile(dproducts, dmap_row, K, key_K, key_K))
        dmap_KK = tl.dot(tl.trans(behind_KK), d_KK, dmap_KK)
    tl.store(tile(dmaps, dmap_row, K, key_K, key_K), dmap_KK.to(dmaps.dtype.element_ty))


@triton.jit(do_not_specialize=VARYING)
def span_gradient_kernel(
    maps, k_carried, dk_far, dspan_maps, dproducts, S, span_tiles,
    K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Rows of the gradients of P_{L-1} ... P_t for every tile t of a span, from those of the whole
    product and of the keys at the span's right edge."""
    m, row_R = part(ROWS, K)
    bg = tl.program_id(1).to(tl.int64)
    row_C, key_K = tl.arange(0, C), tl.arange(0, K)
    span_row = (bg * (S // (span_tiles * C)) + m) * K
    d_RK = tl.load(tile(dspan_maps, span_row, K, row_R, key_K)).to(tl.float32)
    for i in range(span_tiles):
        n = bg * (S // C) + m * span_tiles + i
        tl.store(tile(dproducts, n * K, K, row_R, key_K), d_RK.to(LOW))
        map_KK = tl.load(tile(maps, n * K, K, key_K, key_K)).to(LOW)
        d_RK = tl.dot(d_RK.to(LOW), tl.trans(map_KK))
        dk_CR = tl.load(tile(dk_far, n * C, K, row_C, row_R))
        k_CK = tl.load(tile(k_carried, n * C, K, row_C, key_K)).to(LOW)
        d_RK = tl.dot(tl.trans(dk_CR), k_CK, d_RK)
