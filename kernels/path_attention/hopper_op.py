"""Launches attention with Householder maps on Hopper (hopper_*.py) in place of Triton's kernels."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from mixtron.kernels.hopper_launching import (
    WARPS,
    head_boxes,
    programs,
    row_boxes,
    scalar_boxes,
    token_boxes,
)
from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention.hopper_backward import hopper_key_kernel
from mixtron.kernels.path_attention.hopper_forward import hopper_forward_kernel
from mixtron.kernels.path_attention.hopper_query_backward import hopper_query_kernel

if TYPE_CHECKING:
    from mixtron.kernels.path_attention.triton_carry import CarriedGradients
    from mixtron.kernels.path_attention.triton_op import Piece

launch_forward = Launched(hopper_forward_kernel)
launch_keys = Launched(hopper_key_kernel)
launch_queries = Launched(hopper_query_kernel)


def attend(piece: "Piece", o_BTHV: Tensor, lse_BHS: Tensor) -> None:
    """Writes the output and the log-sum-exps of a piece."""
    v, carried, layout, gates = piece.inputs.v, piece.carried, piece.layout, piece.gates
    assert carried is not None
    (B, T, H, _), G = o_BTHV.shape, v.shape[2]
    work = layout.tiles * B * H
    tokens = None if gates is None else gates.tokens_4BHS
    launch_forward(
        (programs(v.device, work),),
        row_boxes(carried.q, 128),
        row_boxes(carried.k, 128),
        token_boxes(v, 128),
        row_boxes(carried.logits.view(v.dtype), 128),
        tokens,
        None if gates is None else gates.blocks_BHN,
        layout.start_S,
        o_BTHV,
        lse_BHS,
        *(T, layout.tiles, layout.levels, layout.reach, layout.versions),
        *(0 if tokens is None else tokens.stride(0), layout.heads, H, work),
        R=H // G,
        GATE=gates is not None,
        DOCUMENTS=layout.start_S is not None,
        FINE=gl.float16 if carried.logits.dtype == torch.float16 else gl.float32,
        num_warps=WARPS,
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
    gate the sums of ds over columns, but for those inside tiles. Some tile must see another."""
    v, carried, layout, gates = piece.inputs.v, piece.carried, piece.layout, piece.gates
    assert carried is not None
    (B, T, H, _), G = do_BTHV.shape, v.shape[2]
    work = layout.tiles * B * G
    tokens = None if gates is None else gates.tokens_4BHS
    launch_keys(
        (programs(v.device, work),),
        row_boxes(carried.q, 64),
        row_boxes(carried.k, 64),
        token_boxes(v, 64),
        row_boxes(carried.logits.view(v.dtype), 64),
        row_boxes(carried.maps, 128),
        token_boxes(do_BTHV, 64),
        scalar_boxes(less_BHS, 64),
        scalar_boxes(delta_BHS, 64),
        row_boxes(gradients.k_right, 64),
        row_boxes(gradients.k, 64),
        token_boxes(dv_BTGV, 64),
        tokens,
        None if gates is None else gates.blocks_BHN,
        layout.start_S,
        layout.end_S,
        columns_PBHS,
        *(T, layout.tiles, layout.levels, layout.reach, layout.versions, layout.nodes),
        *(0 if tokens is None else tokens.stride(0), H, work),
        R=H // G,
        GATE=gates is not None,
        DOCUMENTS=layout.start_S is not None,
        FINE=gl.float16 if carried.logits.dtype == torch.float16 else gl.float32,
        num_warps=WARPS,
    )


def attend_queries(
    piece: "Piece",
    do_BTHV: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    gradients: "CarriedGradients",
    dq_BTHK: Tensor,
    ds: tuple[Tensor, Tensor] | None,
) -> None:
    """Writes a piece's gradients of queries, in versions, at left edges and of the op's input, of
    logits and M; with a gate the sums of ds over rows, and over columns inside tiles. Some tile sees
    another."""
    (_, k, v, _), carried = vars(piece.inputs).values(), piece.carried
    layout, gates, factors = piece.layout, piece.gates, piece.factors
    assert carried is not None
    assert factors is not None
    (B, T, H, _), G = do_BTHV.shape, v.shape[2]
    work = layout.tiles * B * H
    tokens = None if gates is None else gates.tokens_4BHS
    launch_queries(
        (programs(v.device, work),),
        row_boxes(carried.q, 64),
        row_boxes(carried.k, 64),
        head_boxes(v, 64),
        head_boxes(do_BTHV, 64),
        row_boxes(carried.maps, 128),
        head_boxes(k, 64),
        row_boxes(factors.w.view(k.dtype), 64),
        row_boxes(carried.XT, 128),
        row_boxes(carried.Y.view(k.dtype), 64),
        row_boxes(gradients.q, 64),
        row_boxes(gradients.q_left, 64),
        carried.logits,
        tokens,
        None if gates is None else gates.blocks_BHN,
        layout.start_S,
        lse_BHS,
        delta_BHS,
        factors.beta,
        gradients.logits,
        gradients.M,
        dq_BTHK,
        *((None, None) if ds is None else ds),
        piece.scale,
        *(T, layout.S, layout.tiles, layout.levels, layout.reach, layout.versions, layout.nodes),
        *(0 if tokens is None else tokens.stride(0), layout.heads, H, work),
        R=H // G,
        GATE=gates is not None,
        DOCUMENTS=layout.start_S is not None,
        num_warps=WARPS,
    )
