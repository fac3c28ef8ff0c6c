"""Launches attention with Householder maps on Hopper (hopper_*.py) in place of Triton's kernels."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mixtron.kernels.hopper_tools import SWIZZLED, SWIZZLED_3
from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention.hopper_forward import hopper_forward_kernel

if TYPE_CHECKING:
    from mixtron.kernels.path_attention.triton_op import Piece

WARPS = 4
"""Of the first consumer: the compiler adds the others'."""
launch_forward = Launched(hopper_forward_kernel)


def row_boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of so many rows of a tensor in one piece, as a matrix of its last dimension."""
    K = x.shape[-1]
    # Of no rows none is loaded, but a descriptor must have one.
    matrix = x.view(-1, K) if x.numel() else x.new_empty(1, K)
    return TensorDescriptor.from_tensor(matrix, [rows, K], SWIZZLED)


def token_boxes(x_BTHK: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of so many tokens of one head, zeros behind a row's last token; heads may be some of
    those that lie there."""
    B, T, H, K = x_BTHK.shape
    shape, strides = [B, T, H * K], [*x_BTHK.stride()[:2], 1]
    return TensorDescriptor(x_BTHK, shape, strides, [1, rows, K], SWIZZLED_3)


def programs(device: torch.device, work: int) -> int:
    """Of kernels of which a multiprocessor has one and that share out pieces of work."""
    if device.type != "cuda":
        return min(3, work)
    return min(torch.cuda.get_device_properties(device).multi_processor_count, work)


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
