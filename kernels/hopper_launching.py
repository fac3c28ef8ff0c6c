"""What launches of Gluon kernels for Hopper are given: tensors' descriptors, how many programs."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mixtron.kernels.hopper_tools import LINEAR, SWIZZLED, SWIZZLED_3

WARPS = 4
"""Of the first consumer: the compiler adds the others'."""


def row_boxes(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Boxes of so many rows and columns, or all columns, of a tensor in one piece, as a matrix of
    its last dimension."""
    K = x.shape[-1]
    # Of no rows none is loaded, but a descriptor must have one.
    matrix = x.view(-1, K) if x.numel() else x.new_empty(1, K)
    return TensorDescriptor.from_tensor(matrix, [rows, columns or K], SWIZZLED)


def token_boxes(x_BTHK: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of so many tokens of one head, zeros behind a row's last token; heads may be some of
    those that lie there."""
    B, T, H, K = x_BTHK.shape
    shape, strides = [B, T, H * K], [*x_BTHK.stride()[:2], 1]
    return TensorDescriptor(x_BTHK, shape, strides, [1, rows, K], SWIZZLED_3)


def head_boxes(x_BTHK: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """The same in two dimensions, of all of a head's columns or so many, for who may read the next
    row of the batch behind a row's last token."""
    B, T, H, K = x_BTHK.shape
    shape, strides = [B * T, H * K], [x_BTHK.stride(1), 1]
    return TensorDescriptor(x_BTHK, shape, strides, [rows, columns or K], SWIZZLED)


def scalar_boxes(x: Tensor, count: int) -> TensorDescriptor:
    """Boxes of so many numbers of an fp32 tensor in one piece."""
    return TensorDescriptor.from_tensor(x.view(-1), [count], LINEAR)


def plane_boxes(x: Tensor, count: int) -> TensorDescriptor:
    """The same of planes [L, ...], each of which is in one piece: with what is between them."""
    numbers = (x.shape[0] - 1) * x.stride(0) + x[0].numel()
    return TensorDescriptor(x, [numbers], [1], [count], LINEAR)


def fine(x: Tensor) -> gl.dtype:
    """What a kernel takes entries for that it is given as of the other operands' dtype."""
    return gl.float16 if x.dtype == torch.float16 else gl.float32


def programs(device: torch.device, work: int) -> int:
    """Of kernels of which a multiprocessor has one and that share out pieces of work."""
    if device.type != "cuda":
        return min(3, work)
    return min(torch.cuda.get_device_properties(device).multi_processor_count, work)
