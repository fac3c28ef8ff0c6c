"""SwiGLU on a GPU: a tile of tokens and channels at a time.

y = s(g) u,   du = dy s(g),   dg = dy u s'(g)      s(g) = g sigmoid(g)
"""

# triton.cdiv is taken for the compiler's.
# pyright: reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.launching import Launched

BLOCK, BACKWARD_BLOCK = 1024, 4096
"""Channels of a program; it owns one token, so that its reads are of dense rows."""


def swiglu_triton(joined: Tensor) -> Tensor:
    """Argument and result of `swiglu`."""
    return _SwiGLU.apply(joined)  # type: ignore[return-value]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, joined):
        ctx.save_for_backward(joined)
        return activate(joined.contiguous())

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        (joined,) = ctx.saved_tensors
        return gradient(joined.contiguous(), dy.contiguous())


def activate(joined: Tensor) -> Tensor:
    F = joined.shape[-1] // 2
    y = joined.new_empty(*joined.shape[:-1], F)
    if y.numel():
        forward(_grid(joined, BLOCK), joined, y, F=F, BLOCK=BLOCK, num_warps=4)
    return y


def gradient(joined: Tensor, dy: Tensor, y: Tensor | None = None) -> Tensor:
    """Of dense tensors; fills `y`, perhaps dy itself, with the output again if it is given."""
    djoined = torch.empty_like(joined)
    if dy.numel():
        F = dy.shape[-1]
        options = {"F": F, "BLOCK": BACKWARD_BLOCK, "AGAIN": y is not None}
        backward(_grid(joined, BACKWARD_BLOCK), joined, dy, djoined, y, **options, num_warps=4)
    return djoined


def _grid(joined: Tensor, block: int) -> tuple[int, int]:
    width = joined.shape[-1]
    return joined.numel() // width, triton.cdiv(width // 2, block)


@triton.jit
def swiglu_forward_kernel(joined, y, F: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < F
    gate = tl.load(joined + token * 2 * F + channel, inside, 0.0).to(tl.float32)
    up = tl.load(joined + token * 2 * F + F + channel, inside, 0.0).to(tl.float32)
    active = gate * tl.sigmoid(gate) * up
    tl.store(y + token * F + channel, active.to(y.dtype.element_ty), inside)


@triton.jit
def swiglu_backward_kernel(
    joined, dy, djoined, y, F: tl.constexpr, BLOCK: tl.constexpr, AGAIN: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < F
    row = token * 2 * F + channel
    gate = tl.load(joined + row, inside, 0.0).to(tl.float32)
    up = tl.load(joined + row + F, inside, 0.0).to(tl.float32)
    slope = tl.load(dy + token * F + channel, inside, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = slope * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(djoined + row, dgate.to(djoined.dtype.element_ty), inside)
    dup = slope * gate * sigmoid
    tl.store(djoined + row + F, dup.to(djoined.dtype.element_ty), inside)
    if AGAIN:
        active = gate * sigmoid * up
        tl.store(y + token * F + channel, active.to(y.dtype.element_ty), inside)


forward, backward = Launched(swiglu_forward_kernel), Launched(swiglu_backward_kernel)
