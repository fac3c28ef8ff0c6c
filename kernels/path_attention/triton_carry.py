"""What the Householder maps are replaced by before attention: queries in versions, keys carried to
right edges, logits inside tiles. Torch, linear in T but for the versions; differentiable."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.kernels.path_attention.triton_maps import Versions, pair_row
from mixtron.kernels.path_attention.triton_tiles import Tiles


@dataclass
class Carried:
    """Of S tokens in tiles of C, `span` tiles a span. fp32 but for the versions of the queries."""

    q_near: Tensor
    """[B, H, spans, pairs of tiles, C, K]: q to the right edge of an earlier tile of its span."""
    q_far: Tensor
    """[B, H, 1, pairs of spans, span C, K]: q to the right edge of an earlier span."""
    k: Tensor
    """[B, G, S, K]: carried to its tile's right edge."""
    k_far: Tensor
    """[B, G, S, K]: carried to its span's right edge."""
    logits: Tensor
    """[B, H, S, C] inside tiles, without gates, not masked."""


def span_tiles(tokens: int, C: int) -> int:
    """Tiles in a span, a power of 2 near the root of their number: a query has a version for about
    half the tiles of its span and for about half the spans."""
    tiles = max(1, -(-tokens // C))
    return 2 ** ((tiles.bit_length() - 1) // 2)


def workspace_bytes(S: int, K: int, shared: int, C: int, span: int, lags: int) -> int:
    """About what `carry` and its gradient need, for one key/value head of one row."""
    tiles, far = S // C, pair_row(S // (C * span), lags)
    versions = 2 * 2 * K * shared * (S * (span - 1) // 2 + far * span * C)
    return versions + 4 * K * K * 6 * tiles + 4 * S * (6 * K * (1 + shared) + 4 * C * (1 + shared))


def carry(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    w_BTGK: Tensor,
    beta_BTG: Tensor,
    scale: float,
    start_S: Tensor | None,
    S: int,
    C: int,
    span: int,
    lags: int,
) -> Carried:
    """Differentiable. `lags`: how many spans back a document reaches at most."""
    tiles = Tiles.apply(q_BTHK, k_BTGK, w_BTGK, beta_BTG, scale, start_S, S, C)
    q_BHSK, k_BGSK, map_BGNKK, logits_BHSC = tiles  # type: ignore[misc]

    map_BGMLKK = map_BGNKK.unflatten(2, (-1, span))
    to_end, span_map_BGMKK = products_behind(map_BGMLKK)
    k_far_BGMLCK = k_BGSK.unflatten(2, (-1, span, C)) @ to_end.mT

    q_BHMLCK = q_BHSK.unflatten(2, (-1, span, C))
    q_near, q_start = Versions.apply(q_BHMLCK, map_BGMLKK, span, q_BTHK.dtype, C)  # type: ignore[misc]
    # One sequence of spans.
    q_BH1MUK, map_BG1MKK = q_start.flatten(3, 4)[:, :, None], span_map_BGMKK[:, :, None]
    q_far, _ = Versions.apply(q_BH1MUK, map_BG1MKK, lags, q_BTHK.dtype, C)  # type: ignore[misc]
    return Carried(q_near, q_far, k_BGSK, k_far_BGMLCK.flatten(2, 4), logits_BHSC)


def products_behind(map_BGMLKK: Tensor) -> tuple[Tensor, Tensor]:
    """P_{L-1} ... P_{t+1} for every t, and all of them."""
    product = torch.eye(map_BGMLKK.shape[-1], dtype=map_BGMLKK.dtype, device=map_BGMLKK.device)
    product = product.expand_as(map_BGMLKK[:, :, :, 0])
    found = []
    for t in reversed(range(map_BGMLKK.shape[3])):
        found.append(product)
        product = product @ map_BGMLKK[:, :, :, t]
    return torch.stack(found[::-1], dim=3), product
