"""What launches of Gluon kernels for Hopper are given: tensors' descriptors, how many programs."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mixtron.kernels.hopper_tools import LINEAR, SWIZZLED, SWIZZLED_3

WARPS = 4
"""Of the first consumer: the compiler adds the others'."""
ALIGNED_BYTES = 16
"""What is copied by boxes begins at a multiple."""


def row_boxes(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Boxes of so many rows and columns, or all columns, of a tensor in one piece, as a matrix of
    its last dimension."""
    K = x.shape[-1]
    assert x.is_contiguous(), x.stride()
    # Of no rows none is loaded, but a descriptor must have one.
    matrix = x if x.numel() else x.new_empty(1, K)
    return _boxes(matrix, [matrix.numel() // K, K], [K, 1], [rows, columns or K], SWIZZLED)


def token_boxes(x_BTHK: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of so many tokens of one head, zeros behind a row's last token; heads may be some of
    those that lie there."""
    B, T, H, K = x_BTHK.shape
    shape, strides = [B, T, H * K], [*x_BTHK.stride()[:2], 1]
    return _boxes(x_BTHK, shape, strides, [1, rows, K], SWIZZLED_3)


def head_boxes(x_BTHK: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """The same in two dimensions, of all of a head's columns or so many, for who may read the next
    row of the batch behind a row's last token."""
    B, T, H, K = x_BTHK.shape
    shape, strides = [B * T, H * K], [x_BTHK.stride(1), 1]
    return _boxes(x_BTHK, shape, strides, [rows, columns or K], SWIZZLED)


def scalar_boxes(x: Tensor, count: int) -> TensorDescriptor:
    """Boxes of so many numbers of an fp32 tensor in one piece."""
    assert x.is_contiguous(), x.stride()
    return _boxes(x, [x.numel()], [1], [count], LINEAR)


def plane_boxes(x: Tensor, count: int) -> TensorDescriptor:
    """The same of planes [L, ...], each of which is in one piece: with what is between them."""
    numbers = (x.shape[0] - 1) * x.stride(0) + x[0].numel()
    return _boxes(x, [numbers], [1], [count], LINEAR)


def _boxes(
    x: Tensor, shape: list[int], strides: list[int], box: list[int], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """Without Triton's checks, which for a kernel's dozen take the host longer than its launch."""
    assert x.data_ptr() % ALIGNED_BYTES == 0, f"{list(x.shape)} begins at {x.data_ptr():#x}"
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, shape, strides
    made.block_shape, made.layout, made.padding = box, layout, "zero"
    return made


def aligned(x: Tensor) -> Tensor:
    """It, or a copy, in one piece that begins where boxes of it may."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNED_BYTES == 0 else x.clone()


def fine(x: Tensor) -> gl.dtype:
    """What a kernel takes entries for that it is given as of the other operands' dtype."""
    return gl.float16 if x.dtype == torch.float16 else gl.float32


def programs(device: torch.device, work: int) -> int:
    """Of kernels of which a multiprocessor has one and that share out pieces of work."""
    if device.type != "cuda":
        return min(3, work)
    return min(torch.cuda.get_device_properties(device).multi_processor_count, work)
