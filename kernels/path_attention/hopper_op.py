"""Launches attention with Householder maps on Hopper (hopper_*.py) in place of Triton's kernels."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mixtron.kernels.hopper_launching import (
    WARPS,
    fine,
    head_boxes,
    plane_boxes,
    row_boxes,
    scalar_boxes,
    token_boxes,
)
from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention.hopper_backward import hopper_key_kernel
from mixtron.kernels.path_attention.hopper_forward import hopper_forward_kernel
from mixtron.kernels.path_attention.hopper_query_backward import hopper_query_kernel
from mixtron.kernels.path_attention.triton_gates import EdgeSums, GateSums
from mixtron.kernels.path_attention.triton_plan import Layout

if TYPE_CHECKING:
    from mixtron.kernels.path_attention.triton_carry import CarriedGradients
    from mixtron.kernels.path_attention.triton_op import Piece

launch_forward = Launched(hopper_forward_kernel)
launch_keys = Launched(hopper_key_kernel)
launch_queries = Launched(hopper_query_kernel)


def attend(piece: "Piece", o_BTHV: Tensor, lse_BHS: Tensor) -> None:
    """Writes the output and the log-sum-exps of a piece."""
    v, carried, layout = piece.inputs.v, piece.carried, piece.layout
    assert carried is not None
    B, T, H, _ = o_BTHV.shape
    less, after, plane = _edge_boxes(piece, 128)
    launch_forward(
        (layout.tiles, B * H),
        row_boxes(carried.q, 128),
        row_boxes(carried.k, 128),
        token_boxes(v, 128),
        row_boxes(carried.logits.view(v.dtype), 128),
        less,
        after,
        layout.start_S,
        o_BTHV,
        lse_BHS,
        *(T, *_tree(layout), plane, layout.heads, H),
        FINE=fine(carried.logits),
        **_options(piece, H),
    )


def attend_keys(
    piece: "Piece",
    do_BTHV: Tensor,
    delta_BHS: Tensor,
    less_BHS: Tensor,
    gradients: "CarriedGradients",
    dv_BTGV: Tensor,
    columns_PBHS: Tensor | None,
) -> None:
    """Writes a piece's gradients of keys, in versions and at right edges, and of values; with a
    gate the sums of ds over columns, also inside tiles. Some tile must see another."""
    v, carried, layout = piece.inputs.v, piece.carried, piece.layout
    assert carried is not None
    B, T, H, _ = do_BTHV.shape
    less, _, plane = _edge_boxes(piece, 64)
    after_LBHS = until_BHS = None
    if piece.gates is not None:
        after_LBHS, until_BHS = _edges(piece.gates).after_LBHS, piece.gates.tokens_4BHS[0]
    launch_keys(
        (layout.tiles, B * v.shape[2]),
        row_boxes(carried.q, 64),
        row_boxes(carried.k, 64),
        token_boxes(v, 64),
        row_boxes(carried.logits.view(v.dtype), 64),
        row_boxes(carried.maps, 128),
        token_boxes(do_BTHV, 64),
        less or scalar_boxes(less_BHS, 64),
        scalar_boxes(delta_BHS, 64),
        row_boxes(gradients.k_right, 64),
        row_boxes(gradients.k, 64),
        token_boxes(dv_BTGV, 64),
        after_LBHS,
        until_BHS,
        layout.start_S,
        layout.end_S,
        columns_PBHS,
        *(T, *_tree(layout), layout.nodes, plane, H),
        FINE=fine(carried.logits),
        **_options(piece, H),
    )


def attend_queries(
    piece: "Piece",
    do_BTHV: Tensor,
    delta_BHS: Tensor,
    less_BHS: Tensor,
    gradients: "CarriedGradients",
    dq_BTHK: Tensor,
    rows_BHS: Tensor | None,
) -> None:
    """Writes a piece's gradients of queries, in versions, at left edges and of the op's input, of
    logits and M; with a gate the sums of ds over rows. Some tile must see another."""
    k, v, layout = piece.inputs.k, piece.inputs.v, piece.layout
    carried, factors = piece.carried, piece.factors
    assert carried is not None
    assert factors is not None
    B, T, H, _ = do_BTHV.shape
    less, after, plane = _edge_boxes(piece, 64)
    until, less_LBHS = None, less_BHS
    if piece.gates is not None:
        until = scalar_boxes(piece.gates.tokens_4BHS[0], 64)
        less_LBHS = _edges(piece.gates).less_LBHS
    launch_queries(
        (layout.tiles, B * H),
        row_boxes(carried.q, 64),
        row_boxes(carried.k, 64),
        head_boxes(v, 64),
        head_boxes(do_BTHV, 64),
        row_boxes(carried.logits.view(v.dtype), 64),
        row_boxes(carried.maps, 128),
        head_boxes(k, 64),
        row_boxes(factors.w.view(k.dtype), 64),
        row_boxes(carried.XT, 128),
        row_boxes(carried.Y.view(k.dtype), 64),
        row_boxes(gradients.q, 64),
        row_boxes(gradients.q_left, 64),
        scalar_boxes(factors.beta, 64),
        less,
        after,
        until,
        layout.start_S,
        less_LBHS,
        delta_BHS,
        gradients.logits,
        gradients.M,
        dq_BTHK,
        rows_BHS,
        piece.scale,
        *(T, layout.S, *_tree(layout), layout.nodes, plane, layout.heads, H),
        FINE=fine(carried.logits),
        **_options(piece, H),
    )


def _edges(gates: GateSums) -> EdgeSums:
    assert gates.edges is not None
    return gates.edges


def _edge_boxes(
    piece: "Piece", count: int
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, int]:
    """Of so many of the gates' sums to edges; and how far planes are apart."""
    if piece.gates is None:
        return None, None, 0
    less_LBHS, after_LBHS = vars(_edges(piece.gates)).values()
    return plane_boxes(less_LBHS, count), plane_boxes(after_LBHS, count), less_LBHS.stride(0)


def _tree(layout: Layout) -> tuple[int, int, int, int]:
    return layout.tiles, layout.levels, layout.reach, layout.versions


def _options(piece: "Piece", H: int) -> dict[str, Any]:
    """What a launch for H query heads is compiled with."""
    return {
        "R": H // piece.inputs.v.shape[2],
        "GATE": piece.gates is not None,
        "DOCUMENTS": piece.layout.start_S is not None,
        "num_warps": WARPS,
    }
