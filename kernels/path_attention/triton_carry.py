"""What the Householder maps are replaced by before attention: queries in versions, keys carried to
right edges, logits inside tiles. Linear in T but for the versions."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention import hopper_carry
from mixtron.kernels.path_attention.triton_maps import (
    key_version_kernel,
    map_gradient_kernel,
    node_kernel,
    query_version_kernel,
)
from mixtron.kernels.path_attention.triton_plan import Layout, warp_specialized
from mixtron.kernels.path_attention.triton_tile_gradients import (
    tile_gradient_kernel,
)
from mixtron.kernels.path_attention.triton_tiles import inverse_kernel, map_kernel
from mixtron.kernels.triton_tools import INTERPRETED

launch_inverse = Launched(inverse_kernel)
launch_map = Launched(map_kernel)
launch_node = Launched(node_kernel)
launch_key_version = Launched(key_version_kernel)
launch_query_version = Launched(query_version_kernel)
launch_map_gradient = Launched(map_gradient_kernel)
launch_tile_gradient = Launched(tile_gradient_kernel)


@dataclass(frozen=True)
class Share:
    """Of a kernel's program."""

    rows: int
    """Of its tile, or of a map; at most all of them."""
    warps: int


SHARES = {
    "inverse": Share(rows=128, warps=4),
    "map": Share(rows=64, warps=4),
    "node": Share(rows=64, warps=4),
    "key version": Share(rows=64, warps=4),
    "query version": Share(rows=64, warps=4),
    "map gradient": Share(rows=64, warps=4),
    "tile gradient": Share(rows=128, warps=8),
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
    """Of S tokens in tiles of C: what attention reads, then what backward does. Versions and nodes
    as in triton_tree.py; q's dtype, or `fine`."""

    q: Tensor
    """[B, H, versions, C, K], scaled."""
    k: Tensor
    """[B, G, versions, C, K]."""
    logits: Tensor
    """[B, H, S, C] inside tiles, without gates, not masked; fine."""
    maps: Tensor
    """[B, G, nodes, K, K] fine."""
    XT: Tensor
    """[B, G, S, C] fine: X^T before beta."""
    Y: Tensor
    """[B, G, S, K] fine: before beta."""


@dataclass
class CarriedGradients:
    """Of the first three of `Carried`, in q's dtype: in place of a version's gradient that of the
    next one."""

    q: Tensor
    k: Tensor
    q_left: Tensor
    """[B, H, S, K]: of q at its tile's left edge."""
    k_right: Tensor
    """[B, G, S, K]: of k at its tile's right edge."""
    logits: Tensor
    """In place of these, which no kernel reads after the one that owns queries."""
    M: Tensor
    """[B, H, S, C]: less its sign, of tril(Q W^T)."""

    @staticmethod
    def empty(carried: Carried) -> "CarriedGradients":
        x, low = carried, carried.k.dtype
        (B, H, S, _), (G, *_, K) = x.logits.shape, x.k.shape[1:]
        return CarriedGradients(
            q=torch.empty_like(x.q),
            k=torch.empty_like(x.k),
            q_left=x.k.new_empty(B, H, S, K),
            k_right=x.k.new_empty(B, G, S, K),
            logits=x.logits.view(low),
            M=torch.empty_like(x.logits, dtype=low),
        )


def workspace_bytes(layout: Layout, K: int, shared: int) -> int:
    """About what `Carried` and its gradients need, for one key/value head of one row."""
    S, C = layout.S, layout.tile
    keys = 2 * (layout.versions * C * K + layout.nodes * K * K) + S * (C + 2 * K)
    queries = 2 * layout.versions * C * K + S * (2 * C + K)
    return 2 * (keys + shared * queries)


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


def maps_of(w: Tensor, beta: Tensor, L: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Y [B, G, S, K] and the nodes' maps [B, G, nodes, K, K]."""
    B, G, S, K = w.shape
    C, N, nodes = layout.tile, layout.tiles, layout.nodes
    Y, maps = torch.empty_like(w), w.new_empty(B, G, nodes, K, K)
    parts, shares = _shares("map", K, "COLUMNS")
    options = {"K": K, "C": C, "FINE": FINE, "num_stages": 1}
    launch_map((parts * N, B * G), w, beta, L, Y, maps, S, nodes, **shares, **options)
    parts, shares = _shares("node", K)
    row = 0
    for level in range(1, layout.crossed_levels):
        grid = parts * (N >> level), B * G
        launch_node(grid, maps, row, level, N, nodes, K=K, num_stages=1, **shares)
        row += N >> (level - 1)
    return Y, maps


def carry(
    q_BTHK: Tensor, k_BTGK: Tensor, factors: Factors, scale: float, layout: Layout
) -> Carried:
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    S, C, N = layout.S, layout.tile, layout.tiles
    fine = factors.w.dtype

    def new(*shape: int, dtype: torch.dtype = fine) -> Tensor:
        return q_BTHK.new_empty(B, *shape, dtype=dtype)

    low = q_BTHK.dtype
    w, beta, L = vars(factors).values()
    Y, maps = maps_of(w, beta, L, layout)
    x = Carried(
        q=new(H, layout.versions, C, K, dtype=low),
        k=new(G, layout.versions, C, K, dtype=low),
        logits=new(H, S, C),
        maps=maps,
        XT=new(G, S, C),
        Y=Y,
    )
    if warp_specialized(q_BTHK.device, K, K):
        operands = q_BTHK, k_BTGK, w, beta, L, Y, maps
        hopper_carry.versions(*operands, scale, layout, x.XT, x.logits, x.q, x.k)
        return x
    options = {"K": K, "C": C, "FINE": FINE, "num_stages": 1}
    documents = {"DOCUMENTS": layout.start_S is not None}
    tree = N, layout.levels, layout.reach, layout.versions, layout.nodes
    parts, shares = _shares("key version", C)
    launch_key_version(
        (parts * N, B * G),
        k_BTGK, w, beta, layout.start_S, layout.end_S, L, x.maps, x.XT, x.k,
        T, layout.heads // (H // G), G, *tree, **shares, **documents, **options,
    )  # fmt: skip
    parts, shares = _shares("query version", C)
    launch_query_version(
        (parts * N, B * H),
        q_BTHK, k_BTGK, w, beta, layout.start_S, x.XT, x.Y, x.maps, x.logits, x.q, scale,
        T, layout.heads, H, *tree, R=H // G, **shares, **documents, **options,
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
    dk: Tensor,
    dw: Tensor,
    dbeta: Tensor,
) -> None:
    """Writes dk to dbeta, laid out like the op's inputs. `gradients` is overwritten."""
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    C, N, start_S = layout.tile, layout.tiles, layout.start_S
    x, d = carried, gradients
    w, beta, L = vars(factors).values()
    sizes = {"K": K, "C": C, "num_stages": 1}
    options = sizes | {"R": H // G, "DOCUMENTS": start_S is not None}
    of_queries = T, layout.S, layout.heads, H
    dmaps = _map_gradients(x, d, layout, H)
    if H == G and warp_specialized(q_BTHK.device, K, K):
        operands = w, beta, L, x.XT, x.Y, d.logits, d.M, d.q_left, d.k_right, dmaps
        hopper_carry.tile_gradients(q_BTHK, k_BTGK, *operands, scale, layout, dk, dw, dbeta)
        return
    launch_tile_gradient(
        (N, B * G),
        q_BTHK, k_BTGK, w, beta, start_S, L, x.XT, x.Y, d.logits, d.M, d.q_left, d.k_right, dmaps,
        dk, dw, dbeta, scale, *of_queries, layout.nodes,
        LOW=LOW, num_warps=SHARES["tile gradient"].warps, **options,
    )  # fmt: skip


def _map_gradients(carried: Carried, gradients: CarriedGradients, layout: Layout, H: int) -> Tensor:
    """[B, G, nodes, K, K], of all nodes from which something comes; from the highest level down."""
    x, d = carried, gradients
    B, G, nodes, K, _ = x.maps.shape
    N, C = layout.tiles, layout.tile
    dmaps = torch.empty_like(x.maps, dtype=d.k.dtype)
    parts, shares = _shares("map gradient", K)
    options = {"R": H // G, "K": K, "C": C, "LOW": LOW, "DOCUMENTS": layout.start_S is not None}
    parents = 0
    for level in reversed(range(max(1, layout.crossed_levels))):
        first = sum(layout.versions_at(n) for n in range(level))
        row = sum(N >> n for n in range(level))
        launch_map_gradient(
            (parts * (N >> level), B * G),
            layout.start_S, layout.end_S, x.q, d.q, x.k, d.k, x.maps, dmaps,
            H, N, level, layout.reach, layout.versions, first, nodes, row, parents,
            STAGES=2 if level > 1 else 1, **shares, **options,
        )  # fmt: skip
        parents = N >> level
    return dmaps
