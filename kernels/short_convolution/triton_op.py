"""Launches the convolution's kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mixtron.kernels.short_convolution.triton_kernels import (
    backward_kernel,
    forward_kernel,
    slope_kernel,
)

STRIPS = 256
"""Programs of a backward at most, for a block of columns; each sums its tokens' part of dw."""


@dataclass(frozen=True)
class Launch:
    block_t: int
    block_e: int
    warps: int


FORWARD = Launch(block_t=32, block_e=64, warps=2)
BACKWARD = Launch(block_t=32, block_e=64, warps=2)


def short_convolution_triton(
    x_TBE: Tensor, weight_EW: Tensor, position_T: Tensor, *, silu: bool
) -> Tensor:
    """Arguments and result of `short_convolution`; x may be a slice of wider rows."""
    return _ShortConvolution.apply(x_TBE, weight_EW, position_T, silu)  # type: ignore[return-value]


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TBE, weight_EW, position_T, silu):
        ctx.save_for_backward(x_TBE, weight_EW, position_T)
        ctx.silu = silu
        y_TBE = torch.empty(x_TBE.shape, dtype=x_TBE.dtype, device=x_TBE.device)
        return convolve(x_TBE, weight_EW, position_T, y_TBE, silu, FORWARD)

    @staticmethod
    def backward(ctx, dy_TBE):  # type: ignore[override]
        x_TBE, weight_EW, position_T = ctx.saved_tensors
        if ctx.silu:
            dy_TBE = slopes(x_TBE, weight_EW, position_T, dy_TBE, FORWARD)
        dx_TBE, dweight_EW = gradients(x_TBE, weight_EW, position_T, dy_TBE, BACKWARD)
        return dx_TBE, dweight_EW, None, None


def convolve(x_TBE, weight_EW, position_T, y_TBE, silu: bool, launch: Launch) -> Tensor:
    """Fills and returns y."""
    x_TE = _columns(x_TBE)
    T, columns = x_TE.shape
    grid = (triton.cdiv(T, launch.block_t), triton.cdiv(columns, launch.block_e))
    forward_kernel[grid](
        x_TE,
        weight_EW.contiguous(),
        position_T,
        y_TBE,
        T,
        x_TE.stride(0),
        COLUMNS=columns,
        E=weight_EW.shape[0],
        W=weight_EW.shape[1],
        SILU=silu,
        BLOCK_T=launch.block_t,
        BLOCK_E=launch.block_e,
        num_warps=launch.warps,
    )
    return y_TBE


def slopes(x_TBE, weight_EW, position_T, dy_TBE, launch: Launch) -> Tensor:
    """The gradient of SiLU's input."""
    x_TE, dy_TE = _columns(x_TBE), _columns(dy_TBE)
    T, columns = x_TE.shape
    dz_TBE = torch.empty(x_TBE.shape, dtype=x_TBE.dtype, device=x_TBE.device)
    slope_kernel[(triton.cdiv(T, launch.block_t), triton.cdiv(columns, launch.block_e))](
        x_TE,
        weight_EW.contiguous(),
        position_T,
        dy_TE,
        dz_TBE,
        T,
        x_TE.stride(0),
        dy_TE.stride(0),
        COLUMNS=columns,
        E=weight_EW.shape[0],
        W=weight_EW.shape[1],
        BLOCK_T=launch.block_t,
        BLOCK_E=launch.block_e,
        num_warps=launch.warps,
    )
    return dz_TBE


def gradients(x_TBE, weight_EW, position_T, dz_TBE, launch: Launch, strips: int = STRIPS):
    """The gradients of x and the weight from that of the convolution."""
    x_TE, dz_TE = _columns(x_TBE), _columns(dz_TBE)
    (T, columns), (E, W) = x_TE.shape, weight_EW.shape
    strip = triton.cdiv(triton.cdiv(T, strips), launch.block_t) * launch.block_t
    programs = triton.cdiv(T, strip)
    dx_TBE = torch.empty(x_TBE.shape, dtype=x_TBE.dtype, device=x_TBE.device)
    partial_PEW = x_TBE.new_empty(programs, columns, W, dtype=torch.float32)
    backward_kernel[(programs, triton.cdiv(columns, launch.block_e))](
        x_TE,
        weight_EW.contiguous(),
        position_T,
        dz_TE,
        dx_TBE,
        partial_PEW,
        T,
        strip,
        x_TE.stride(0),
        dz_TE.stride(0),
        COLUMNS=columns,
        E=E,
        W=W,
        BLOCK_W=triton.next_power_of_2(W),
        BLOCK_T=launch.block_t,
        BLOCK_E=launch.block_e,
        num_warps=launch.warps,
    )
    dweight_EW = partial_PEW.view(-1, E, W).sum(0)
    return dx_TBE, dweight_EW.to(weight_EW.dtype)


def _columns(x_TBE: Tensor) -> Tensor:
    """[T, B E] with dense rows: a view where strides allow one."""
    if x_TBE.stride(2) != 1 and x_TBE.shape[2] > 1:
        x_TBE = x_TBE.contiguous()
    return x_TBE.flatten(1)
