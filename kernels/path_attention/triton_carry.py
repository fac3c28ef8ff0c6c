"""What the Householder maps are replaced by before attention: queries in versions, keys carried to
right edges, logits inside tiles. Linear in T but for the versions."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from mixtron.kernels.path_attention.triton_maps import (
    map_gradient_kernel,
    pairs_before,
    span_gradient_kernel,
    span_kernel,
    version_gradient_kernel,
    version_kernel,
)
from mixtron.kernels.path_attention.triton_plan import Layout
from mixtron.kernels.path_attention.triton_tiles import (
    inverse_gradient_kernel,
    inverse_kernel,
    key_gradient_kernel,
    map_row_gradient_kernel,
    solve_kernel,
)
from mixtron.kernels.triton_tools import INTERPRETED

WARPS = {
    "inverse": 4,
    "solve": 8,
    "span": 8,
    "version": 8,
    "version gradient": 8,
    "map gradient": 8,
    "span gradient": 8,
    "key gradient": 8,
    "inverse gradient": 8,
    "map row gradient": 8,
}
FINE, LOW = (tl.float32, tl.float32) if INTERPRETED else (tl.float16, tl.bfloat16)
"""What bounded operands and gradients are rounded to; the interpreter cannot multiply it."""


@dataclass
class Carried:
    """Of S tokens in tiles of C, `span` tiles a span: what attention reads, then what backward
    does. q's dtype, or fp16 (`fine`), but for L."""

    q_near: Tensor
    """[B, H, spans, pairs of tiles, C, K]: q to the right edge of an earlier tile of its span."""
    q_far: Tensor
    """[B, H, pairs of spans, span C, K]: q to the right edge of an earlier span."""
    k: Tensor
    """[B, G, S, K]: carried to its tile's right edge."""
    k_far: Tensor
    """[B, G, S, K]: carried to its span's right edge."""
    logits: Tensor
    """[B, H, S, C] inside tiles, without gates, not masked; fine."""
    L: Tensor
    """[B, G, S, C] fp32."""
    XT: Tensor
    """[B, G, N, C, C] fine."""
    Y: Tensor
    """[B, G, S, K] fine."""
    maps: Tensor
    """[B, G, N, K, K] fine: the tiles'."""
    to_end: Tensor
    """[B, G, N, K, K] fine: the product of those behind a tile in its span."""
    span_maps: Tensor
    """[B, G, spans, K, K] fine."""


@dataclass
class CarriedGradients:
    """Of the first five of `Carried`, in their dtype but for k's, which is fp32; of the logits in
    q's."""

    q_near: Tensor
    q_far: Tensor
    k: Tensor
    k_far: Tensor
    logits: Tensor

    @staticmethod
    def empty(carried: Carried) -> "CarriedGradients":
        q_near, q_far, k, k_far = (
            torch.empty_like(x) for x in (carried.q_near, carried.q_far, carried.k, carried.k_far)
        )
        logits = torch.empty_like(carried.logits, dtype=k.dtype)
        return CarriedGradients(
            q_near, q_far, torch.empty_like(k, dtype=torch.float32), k_far, logits
        )


def workspace_bytes(layout: Layout, K: int, shared: int) -> int:
    """About what `Carried` and its gradients need, for one key/value head of one row."""
    S, C, span = layout.S, layout.tile, layout.span
    spans = S // (C * span)
    far = pairs_before(spans - 1, spans, layout.lags)
    versions = shared * (S * (span - 1) // 2 + far * span * C)
    tiles = 4 * C + 2 * 2 * C + 2 * 6 * K + 4 * 2 * K + 2 * 4 * K * K // C
    return 2 * 2 * K * versions + S * (tiles + shared * (2 * 4 * C + 2 * K))


def carry(
    q_BTHK: Tensor, k_BTGK: Tensor, w_BTGK: Tensor, beta_BTG: Tensor, scale: float, layout: Layout
) -> Carried:
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    S, C, span, lags, start_S = layout.S, layout.tile, layout.span, layout.lags, layout.start_S
    N, spans = S // C, S // (C * span)
    fine = w_BTGK.dtype if INTERPRETED else torch.float16

    def new(*shape: int, dtype: torch.dtype = fine) -> Tensor:
        return q_BTHK.new_empty(B, *shape, dtype=dtype)

    low = q_BTHK.dtype
    carried = Carried(
        q_near=new(H, spans, span * (span - 1) // 2, C, K, dtype=low),
        q_far=new(H, pairs_before(spans - 1, spans, lags), span * C, K, dtype=low),
        k=new(G, S, K, dtype=low),
        k_far=new(G, S, K, dtype=low),
        logits=new(H, S, C),
        L=new(G, S, C, dtype=torch.float32),
        XT=new(G, N, C, C),
        Y=new(G, S, K),
        maps=new(G, N, K, K),
        to_end=new(G, N, K, K),
        span_maps=new(G, spans, K, K),
    )
    x = carried
    k_exact, maps_rest = torch.empty_like(x.Y), torch.empty_like(x.maps)
    options = {"K": K, "C": C, "DOCUMENTS": start_S is not None, "num_stages": 1}
    of_keys = T, S, layout.heads // (H // G), G
    inverse_kernel[(N, B * G)](
        w_BTGK, beta_BTG, start_S, x.L, *of_keys, num_warps=WARPS["inverse"], **options
    )
    solve_kernel[(N, B * G)](
        k_BTGK, w_BTGK, beta_BTG, start_S, x.L, x.XT, x.Y, x.k, k_exact, x.maps, maps_rest,
        *of_keys, FINE=FINE, num_warps=WARPS["solve"], **options,
    )  # fmt: skip
    span_kernel[(spans, B * G)](
        x.maps, maps_rest, k_exact, x.to_end, x.span_maps, x.k_far, S, span,
        K=K, C=C, FINE=FINE, num_warps=WARPS["span"], num_stages=1,
    )  # fmt: skip
    version_kernel[(N, B * H)](
        q_BTHK, k_BTGK, w_BTGK, start_S, x.XT, x.Y, x.maps, x.span_maps, x.logits, x.q_near,
        x.q_far, scale, T, S, layout.heads, H, span, lags,
        R=H // G, FINE=FINE, PRODUCT=LOW, STAGES=2, num_warps=WARPS["version"], **options,
    )  # fmt: skip
    return carried


def carry_gradients(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    w_BTGK: Tensor,
    beta_BTG: Tensor,
    scale: float,
    layout: Layout,
    carried: Carried,
    gradients: CarriedGradients,
    dq: Tensor,
    dk: Tensor,
    dw: Tensor,
    dbeta: Tensor,
) -> None:
    """Writes dq to dbeta, laid out like q to beta. `gradients` is overwritten."""
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    S, C, span, lags, start_S = layout.S, layout.tile, layout.span, layout.lags, layout.start_S
    N, spans = S // C, S // (C * span)
    x, d = carried, gradients
    options = {"K": K, "C": C, "DOCUMENTS": start_S is not None, "num_stages": 1}
    of_queries, shared = (T, S, layout.heads, H), {"R": H // G, "LOW": LOW}
    M, dM = torch.empty_like(d.logits), torch.empty_like(d.logits)
    dq_carried = q_BTHK.new_empty(B, H, S, K)
    version_gradient_kernel[(N, B * H)](
        q_BTHK, k_BTGK, w_BTGK, start_S, x.XT, x.Y, x.maps, x.span_maps, d.logits, d.q_near,
        d.q_far, dq, M, dM, dq_carried, scale, *of_queries, span, lags,
        **shared, STAGES=2, num_warps=WARPS["version gradient"], **options,
    )  # fmt: skip
    dmaps, dspan_maps = (torch.empty_like(y, dtype=dq.dtype) for y in (x.maps, x.span_maps))
    for versions, dversions, out, grid, blocks, tiles, reached in (
        (x.q_near, d.q_near, dmaps, N, span, 1, span - 1),
        (x.q_far, d.q_far, dspan_maps, spans, spans, span, lags),
    ):
        map_gradient_kernel[(grid, B * G)](
            layout.end_S, versions, dversions, out, H, blocks, tiles, reached,
            R=H // G, STAGES=3, num_warps=WARPS["map gradient"], **options,
        )  # fmt: skip
    span_gradient_kernel[(spans, B * G)](
        x.maps, x.to_end, x.k, d.k_far, dspan_maps, d.k, dmaps, S, span,
        K=K, C=C, LOW=LOW, num_warps=WARPS["span gradient"], num_stages=1,
    )  # fmt: skip
    dX, dB = (torch.empty_like(x.XT, dtype=dq.dtype) for _ in range(2))
    dY = torch.empty_like(x.k)
    key_gradient_kernel[(N, B * G)](
        q_BTHK, k_BTGK, w_BTGK, beta_BTG, start_S, x.L, M, dq_carried, d.logits, d.k, dmaps, dX, dY,
        dB, dk, scale, *of_queries,
        **shared, num_warps=WARPS["key gradient"], **options,
    )  # fmt: skip
    dA = torch.empty_like(dX)
    inverse_gradient_kernel[(N, B * G)](
        k_BTGK, w_BTGK, beta_BTG, start_S, x.L, dX, dY, dA, dbeta,
        T, S, layout.heads // (H // G), G, LOW=LOW, num_warps=WARPS["inverse gradient"], **options,
    )  # fmt: skip
    map_row_gradient_kernel[(N, B * G)](
        q_BTHK, k_BTGK, w_BTGK, beta_BTG, x.L, x.XT, x.Y, dM, d.k, dmaps, dY, dB, dA, dw, dbeta,
        *of_queries, **shared, K=K, C=C, num_warps=WARPS["map row gradient"], num_stages=1,
    )  # fmt: skip
