"""What the Householder maps are replaced by before attention: queries in versions, keys carried to
right edges, logits inside tiles. Torch, linear in T but for the versions; differentiable."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.kernels.path_attention.triton_maps import Products, Versions, pair_row
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
    versions = 2 * K * shared * (S * (span - 1) // 2 + far * span * C)
    maps = 4 * K * K * (tiles * (span + 3) // 2 + far)
    return versions + 2 * maps + 4 * S * (8 * K * (1 + shared) + 4 * C * (1 + shared))


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
    G, K = k_BTGK.shape[2:]
    tiles = Tiles.apply(q_BTHK, k_BTGK, w_BTGK, beta_BTG, scale, start_S, S, C)
    q_BHSK, k_BGSK, map_BGNKK, logits_BHSC = tiles  # type: ignore[misc]

    map_BGMLKK = map_BGNKK.unflatten(2, (-1, span))
    identity_KK = torch.eye(K, dtype=map_BGMLKK.dtype, device=map_BGMLKK.device)
    identity_BGM1KK = identity_KK.expand(*map_BGMLKK.shape[:3], 1, K, K)
    near_BGMPKK = Products.apply(torch.cat([identity_BGM1KK, map_BGMLKK], dim=3), span + 1)
    to_end_BGMLKK = near_BGMPKK[:, :, :, span * (span + 1) // 2 :]
    to_start = [t * (t + 1) // 2 for t in range(span)]
    far_BGPKK = Products.apply(to_end_BGMLKK[:, :, :-1, 0], lags)

    q_BHMLCK = q_BHSK.unflatten(2, (-1, span, C))
    q_BGRMLCK = q_BHMLCK.unflatten(1, (G, -1))
    q_far_BGRMLCK = q_BGRMLCK @ near_BGMPKK[:, :, None, :, to_start]
    k_far_BGMLCK = k_BGSK.unflatten(2, (-1, span, C)) @ to_end_BGMLKK[:, :, :, 1:].mT
    q_near = Versions.apply(q_BHMLCK, near_BGMPKK, span, True, q_BTHK.dtype, C)
    q_far = Versions.apply(
        q_far_BGRMLCK.flatten(1, 2).flatten(3, 4)[:, :, None].contiguous(),
        far_BGPKK[:, :, None],
        lags,
        False,
        q_BTHK.dtype,
        C,
    )
    return Carried(q_near, q_far, k_BGSK, k_far_BGMLCK.flatten(2, 4), logits_BHSC)
