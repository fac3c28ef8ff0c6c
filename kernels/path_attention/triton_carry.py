"""What the Householder maps are replaced by before attention: queries in versions, keys carried to
right edges, logits inside tiles. Linear in T but for the versions."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention.triton_maps import (
    map_gradient_kernel,
    pairs_before,
    query_gradient_kernel,
    span_gradient_kernel,
    span_kernel,
    version_kernel,
)
from mixtron.kernels.path_attention.triton_plan import Layout
from mixtron.kernels.path_attention.triton_tile_gradients import (
    inverse_gradient_kernel,
    key_gradient_kernel,
    row_gradient_kernel,
)
from mixtron.kernels.path_attention.triton_tiles import inverse_kernel, map_kernel, solve_kernel
from mixtron.kernels.triton_tools import INTERPRETED

launch_inverse = Launched(inverse_kernel)
launch_solve = Launched(solve_kernel)
launch_map = Launched(map_kernel)
launch_span = Launched(span_kernel)
launch_version = Launched(version_kernel)
launch_query_gradient = Launched(query_gradient_kernel)
launch_map_gradient = Launched(map_gradient_kernel)
launch_span_gradient = Launched(span_gradient_kernel)
launch_key_gradient = Launched(key_gradient_kernel)
launch_inverse_gradient = Launched(inverse_gradient_kernel)
launch_row_gradient = Launched(row_gradient_kernel)


@dataclass(frozen=True)
class Share:
    """Of a kernel's program."""

    rows: int
    """Of its tile, or of a map; at most all of them."""
    warps: int


SHARES = {
    "inverse": Share(rows=128, warps=4),
    "solve": Share(rows=64, warps=4),
    "map": Share(rows=64, warps=4),
    "span": Share(rows=64, warps=4),
    "version": Share(rows=64, warps=4),
    "query gradient": Share(rows=64, warps=4),
    "map gradient": Share(rows=128, warps=8),
    "span gradient": Share(rows=64, warps=4),
    "key gradient": Share(rows=64, warps=4),
    "inverse gradient": Share(rows=128, warps=4),
    "row gradient": Share(rows=64, warps=4),
}
FINE, LOW = (tl.float32, tl.float32) if INTERPRETED else (tl.float16, tl.bfloat16)
"""What bounded operands and gradients are rounded to; the interpreter cannot multiply it."""


@dataclass
class Factors:
    """What backward takes from forward: of the maps' factors. `fine` is fp16."""

    w: Tensor
    """[B, G, S, K] fine; zeros behind the last token, as in beta."""
    beta: Tensor
    """[B, G, S] fp32."""
    L: Tensor
    """[B, G, S, C] fine: (I + tril(W W^T diag(beta), -1))^-1 of each tile."""

    def part(self, rows: slice, groups: slice) -> "Factors":
        """Views, each in one piece."""
        return Factors(*(x[rows, groups] for x in vars(self).values()))


@dataclass
class Carried:
    """Of S tokens in tiles of C, `span` tiles a span: what attention reads, then what backward
    does. q's dtype, or `fine`."""

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
    XT: Tensor
    """[B, G, S, C] fine: X^T before beta."""
    Y: Tensor
    """[B, G, S, K] fine: before beta."""
    maps: Tensor
    """[B, G, N, K, K] fine: the tiles'."""
    to_end: Tensor
    """[B, G, N, K, K] fine: the product of those behind a tile in its span."""
    span_maps: Tensor
    """[B, G, spans, K, K] fine."""


@dataclass
class CarriedGradients:
    """Of the first five of `Carried`, in q's dtype; k's with what comes from `k_far`. In place of a
    version's gradient stands, by the end, that of its tile's next one alone."""

    q_near: Tensor
    q_far: Tensor
    q_carried: Tensor
    """[B, H, S, K] in q's dtype: of q at its tile's left edge."""
    k: Tensor
    k_far: Tensor
    logits: Tensor

    @staticmethod
    def empty(carried: Carried) -> "CarriedGradients":
        x, low = carried, carried.k.dtype
        B, H, S, _ = x.logits.shape
        return CarriedGradients(
            q_near=torch.empty_like(x.q_near),
            q_far=torch.empty_like(x.q_far),
            q_carried=x.k.new_empty(B, H, S, x.k.shape[-1]),
            k=torch.empty_like(x.k),
            k_far=torch.empty_like(x.k_far),
            logits=torch.empty_like(x.logits, dtype=low),
        )


def workspace_bytes(layout: Layout, K: int, shared: int) -> int:
    """About what `Carried` and its gradients need, for one key/value head of one row."""
    S, C, span = layout.S, layout.tile, layout.span
    spans = S // (C * span)
    far = pairs_before(spans - 1, spans, layout.lags)
    versions = shared * (S * (span - 1) // 2 + far * span * C)
    tiles = 2 * 4 * C + 2 * 7 * K + 2 * 4 * K * K // C + 16
    return 2 * 2 * K * versions + S * (tiles + shared * (2 * 4 * C + 2 * K))


def factors_of(w_BTGK: Tensor, beta_BTG: Tensor, layout: Layout) -> Factors:
    (B, T, G, K), S, C = w_BTGK.shape, layout.S, layout.tile
    fine = w_BTGK.dtype if INTERPRETED else torch.float16
    w, L = (w_BTGK.new_empty(B, G, S, width, dtype=fine) for width in (K, C))
    beta = beta_BTG.new_empty(B, G, S)
    launch_inverse(
        (S // C, B * G),
        w_BTGK, beta_BTG, layout.start_S, w, beta, L, T, S, G,
        K=K, C=C, FINE=FINE, DOCUMENTS=layout.start_S is not None,
        num_warps=SHARES["inverse"].warps, num_stages=1,
    )  # fmt: skip
    return Factors(w, beta, L)


def carry(
    q_BTHK: Tensor, k_BTGK: Tensor, factors: Factors, scale: float, layout: Layout
) -> Carried:
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    S, C, span, lags, start_S = layout.S, layout.tile, layout.span, layout.lags, layout.start_S
    N, spans = S // C, S // (C * span)
    fine = factors.w.dtype

    def new(*shape: int, dtype: torch.dtype = fine) -> Tensor:
        return q_BTHK.new_empty(B, *shape, dtype=dtype)

    low = q_BTHK.dtype
    x = Carried(
        q_near=new(H, spans, span * (span - 1) // 2, C, K, dtype=low),
        q_far=new(H, pairs_before(spans - 1, spans, lags), span * C, K, dtype=low),
        k=new(G, S, K, dtype=low),
        k_far=new(G, S, K, dtype=low),
        logits=new(H, S, C),
        XT=new(G, S, C),
        Y=new(G, S, K),
        maps=new(G, N, K, K),
        to_end=new(G, N, K, K),
        span_maps=new(G, spans, K, K),
    )
    w, beta, L = vars(factors).values()
    k_exact = torch.empty_like(w)
    options = {"K": K, "C": C, "FINE": FINE, "num_stages": 1}
    documents = {"DOCUMENTS": start_S is not None}
    of_keys = T, S, layout.heads // (H // G), G
    parts, shares = _shares("solve", C)
    launch_solve(
        (parts * N, B * G),
        k_BTGK, w, beta, start_S, L, x.XT, x.k, k_exact, *of_keys,
        **shares, **documents, **options,
    )  # fmt: skip
    parts, shares = _shares("map", K, "COLUMNS")
    launch_map((parts * N, B * G), w, beta, L, x.Y, x.maps, S, **shares, **options)
    parts, shares = _shares("span", K)
    launch_span(
        (parts * spans, B * G),
        x.maps, k_exact, x.to_end, x.span_maps, x.k_far, S, span, **shares, **options
    )  # fmt: skip
    parts, shares = _shares("version", C)
    launch_version(
        (parts * N, B * H),
        q_BTHK, k_BTGK, w, beta, start_S, x.XT, x.Y, x.maps, x.span_maps, x.logits, x.q_near,
        x.q_far, scale, T, S, layout.heads, H, span, lags,
        R=H // G, STAGES=2, **shares, **documents, **options,
    )  # fmt: skip
    return x


def _shares(kernel: str, rows: int, name: str = "ROWS") -> tuple[int, dict[str, int]]:
    """How many programs own parts of so many rows, and what their kernel is compiled for."""
    share = SHARES[kernel]
    own = min(share.rows, rows)
    return rows // own, {name: own, "num_warps": share.warps}


def carry_gradients(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    factors: Factors,
    scale: float,
    layout: Layout,
    carried: Carried,
    gradients: CarriedGradients,
    dq: Tensor,
    dk: Tensor,
    dw: Tensor,
    dbeta: Tensor,
) -> None:
    """Writes dq to dbeta, laid out like the op's inputs. `gradients` is overwritten."""
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    S, C, span, lags, start_S = layout.S, layout.tile, layout.span, layout.lags, layout.start_S
    N, spans = S // C, S // (C * span)
    x, d = carried, gradients
    w, beta, L = vars(factors).values()
    sizes = {"K": K, "C": C, "num_stages": 1}
    options = sizes | {"R": H // G, "DOCUMENTS": start_S is not None}
    of_queries = T, S, layout.heads, H
    M, dM = torch.empty_like(d.logits), torch.empty_like(d.logits)
    parts, shares = _shares("query gradient", C)
    launch_query_gradient(
        (parts * N, B * H),
        q_BTHK, k_BTGK, w, beta, start_S, x.XT, x.Y, d.logits, d.q_carried, dq, M, dM,
        scale, *of_queries, LOW=LOW, **shares, **options,
    )  # fmt: skip
    dspan_maps = torch.empty_like(x.span_maps, dtype=dq.dtype)
    dmaps, dproducts = (torch.empty_like(x.maps, dtype=dq.dtype) for _ in range(2))
    gathering = options | {"LOW": LOW, "STAGES": 3, "num_warps": SHARES["map gradient"].warps}
    launch_map_gradient(
        (spans, B * G),
        layout.end_S, x.q_far, d.q_far, None, None, dspan_maps, H, spans, span, lags, **gathering
    )  # fmt: skip
    parts, shares = _shares("span gradient", K)
    launch_span_gradient(
        (parts * spans, B * G),
        x.maps, x.k, d.k_far, dspan_maps, dproducts, S, span, LOW=LOW, **shares, **sizes
    )  # fmt: skip
    launch_map_gradient(
        (N, B * G),
        layout.end_S, x.q_near, d.q_near, x.to_end, dproducts, dmaps, H, span, 1, span - 1,
        **gathering,
    )  # fmt: skip
    ZT, dA = (torch.empty_like(x.XT, dtype=dq.dtype) for _ in range(2))
    V = torch.empty_like(x.k)
    parts, shares = _shares("key gradient", C)
    dbeta_parts = beta.new_empty(parts + 1, *beta.shape)
    launch_key_gradient(
        (parts * N, B * G),
        q_BTHK, w, beta, start_S, L, x.XT, M, d.logits, d.k, ZT, dk, dbeta_parts,
        scale, *of_queries, LOW=LOW, **shares, **options,
    )  # fmt: skip
    launch_inverse_gradient(
        (N, B * G),
        w, beta, start_S, L, x.XT, x.Y, M, d.q_carried, dmaps, ZT, V, dA, dbeta_parts[parts],
        *of_queries, LOW=LOW, num_warps=SHARES["inverse gradient"].warps, **options,
    )  # fmt: skip
    parts, shares = _shares("row gradient", C)
    launch_row_gradient(
        (parts * N, B * G),
        q_BTHK, k_BTGK, w, beta, start_S, x.XT, x.Y, dM, d.k, dmaps, ZT, V, dA, dbeta_parts,
        dw, dbeta, *of_queries, PARTS=dbeta_parts.shape[0], LOW=LOW, **shares, **options,
    )  # fmt: skip
