"""Launches the convolution's kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false

import itertools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.short_convolution.triton_kernels import (
    convolution_backward_kernel,
    convolution_forward_kernel,
)
from mixtron.kernels.split import place_of

MAX_PARTS = 3
SHORTEST_STRIP = 32
STRIPS = 256
"""Programs of a backward at most, for a block of columns; each sums its tokens' part of dw."""


@dataclass(frozen=True)
class Launch:
    block_t: int
    block_e: int
    warps: int


FORWARD = Launch(block_t=32, block_e=64, warps=2)
BACKWARD = Launch(block_t=1, block_e=128, warps=1)


forward_tiles, backward_strips = (
    Launched(convolution_forward_kernel),
    Launched(convolution_backward_kernel),
)


def short_convolution_triton(
    x_TBE: Tensor, weight_EW: Tensor, position_T: Tensor, widths: tuple[int, ...], *, silu: bool
) -> tuple[Tensor, ...]:
    """Arguments and result of `short_convolution`; x may be a slice of wider rows.

    Raises:
        ValueError: more than 3 parts, or parts of several columns of B.
    """
    if len(widths) > MAX_PARTS or (len(widths) > 1 and x_TBE.shape[1] > 1):
        raise ValueError(
            f"widths {widths} of x {list(x_TBE.shape)}: the triton form takes up to {MAX_PARTS} "
            "parts, and several only of [T, 1, E]"
        )
    return _ShortConvolution.apply(x_TBE, weight_EW, position_T, widths, silu)  # type: ignore[return-value]


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TBE, weight_EW, position_T, widths, silu):
        ctx.save_for_backward(x_TBE, weight_EW, position_T)
        ctx.options, ctx.place = (widths, silu), place_of(x_TBE)
        return convolve(x_TBE, weight_EW, position_T, widths, silu, FORWARD)

    @staticmethod
    def backward(ctx, *dys):  # type: ignore[override]
        x_TBE, weight_EW, position_T = ctx.saved_tensors
        dx_TBE = None if ctx.place is None else ctx.place()
        grads = gradients(x_TBE, weight_EW, position_T, dys, *ctx.options, BACKWARD, dx_TBE=dx_TBE)
        return *grads, None, None, None


def convolve(x_TBE, weight_EW, position_T, widths, silu: bool, launch: Launch) -> tuple:
    """The parts [T, B, width], each dense."""
    x_TE = _columns(x_TBE)
    T, B = x_TBE.shape[:2]
    parts = tuple(torch.empty(T, B, w, dtype=x_TBE.dtype, device=x_TBE.device) for w in widths)
    shape = _shape(x_TE, weight_EW, widths, launch)
    forward_tiles(
        _grid(x_TE, shape),
        x_TE,
        weight_EW.contiguous(),
        position_T,
        *_three(parts),
        T,
        x_TE.stride(0),
        SILU=silu,
        **shape,
        num_warps=launch.warps,
    )
    return parts


def gradients(
    x_TBE,
    weight_EW,
    position_T,
    dys,
    widths,
    silu: bool,
    launch: Launch,
    strips: int = STRIPS,
    dx_TBE: Tensor | None = None,
):
    """The gradients of x, written into `dx_TBE` if it is given, and the weight from the parts'."""
    x_TE = _columns(x_TBE)
    T = x_TE.shape[0]
    parts = _three([_columns(dy) for dy in dys])
    shape = _shape(x_TE, weight_EW, widths, launch)
    del shape["BLOCK_T"]
    strip = max(triton.cdiv(T, strips), SHORTEST_STRIP)
    programs = triton.cdiv(T, strip)
    if dx_TBE is None:
        dx_TBE = torch.empty(x_TBE.shape, dtype=x_TBE.dtype, device=x_TBE.device)
    partial_PEW = x_TBE.new_empty(
        programs, *x_TE.shape[1:], weight_EW.shape[1], dtype=torch.float32
    )
    backward_strips(
        (programs, triton.cdiv(x_TE.shape[1], shape["BLOCK_E"])),
        x_TE,
        weight_EW.contiguous(),
        position_T,
        *parts,
        dx_TBE,
        partial_PEW,
        T,
        strip,
        x_TE.stride(0),
        dx_TBE.stride(0),
        *(part.stride(0) for part in parts),
        SILU=silu,
        **shape,
        num_warps=launch.warps,
    )
    dweight_EW = partial_PEW.view(-1, *weight_EW.shape).sum(0)
    return dx_TBE, dweight_EW.to(weight_EW.dtype)


def _shape(x_TE: Tensor, weight_EW: Tensor, widths: tuple[int, ...], launch: Launch) -> dict:
    """What the kernels are compiled for. A block of columns lies within one part."""
    columns = x_TE.shape[1]
    ends = [*itertools.accumulate(widths[:-1]), columns, columns][:2]
    common = math.gcd(*widths) if len(widths) > 1 else launch.block_e
    return {
        "END_0": ends[0],
        "END_1": ends[1],
        "COLUMNS": columns,
        "E": weight_EW.shape[0],
        "W": weight_EW.shape[1],
        "BLOCK_T": launch.block_t,
        "BLOCK_E": min(launch.block_e, common & -common),
    }


def _grid(x_TE: Tensor, shape: dict) -> tuple[int, int]:
    T, columns = x_TE.shape
    return triton.cdiv(T, shape["BLOCK_T"]), triton.cdiv(columns, shape["BLOCK_E"])


def _three(parts) -> list[Tensor]:
    """As many as the kernels take; those beyond the last one are not touched."""
    return [*parts, *[parts[-1]] * (MAX_PARTS - len(parts))]


def _columns(x_TBE: Tensor) -> Tensor:
    """[T, B E] with dense rows: a view where strides allow one."""
    if x_TBE.stride(2) != 1 and x_TBE.shape[2] > 1:
        x_TBE = x_TBE.contiguous()
    return x_TBE.flatten(1)
