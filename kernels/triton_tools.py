"""What the Triton kernels share."""

import os
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2_E = tl.constexpr(1.4426950408889634)


Form = Literal["torch", "triton"]


def form_for(x: Tensor, backend: Form | None) -> Form:
    """Of an op that has one form for each device: Triton's on a GPU, torch's elsewhere.

    Raises:
        ValueError: a dtype or device that Triton's form cannot take.
    """
    form: Form = backend or ("triton" if x.is_cuda else "torch")
    if form == "triton" and not INTERPRETED and not x.is_cuda:
        raise ValueError(f"a tensor on {x.device}: the triton form runs on a GPU")
    if form == "triton" and x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"a tensor of {x.dtype}: the triton form takes bf16, fp16 and fp32")
    return form


HEAD_DIMS = (64, 128)


def check_takes(q: Tensor, v: Tensor, name: str) -> None:
    """Raises ValueError, of q by its name, for what no kernel of queries, keys and values takes:
    another dtype than bf16, another device than a GPU, a width of neither 64 nor 128."""
    if INTERPRETED:
        return
    if q.device.type != "cuda" or q.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {q.dtype} on {q.device}: the triton form takes bf16 on a GPU")
    K, V = q.shape[-1], v.shape[-1]
    if K not in HEAD_DIMS or V not in HEAD_DIMS:
        raise ValueError(f"K={K}, V={V}: the triton form takes 64 or 128 for each")


SHARED_MEMORY_BYTES = {80: 163 * 2**10, 90: 227 * 2**10}
"""That a block may have, by compute capability: an A100; an H100 or H200."""


def architecture(device: torch.device) -> int:
    """The GPU's compute capability, of those that launches are listed for.

    Raises:
        ValueError: another one.
    """
    if INTERPRETED:
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor not in SHARED_MEMORY_BYTES:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}: the "
            "triton form has launches for 8.0 (A100) and 9.0 (H100, H200)"
        )
    return 10 * major + minor


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """What operands of `tl.dot` are rounded to: the inputs' dtype.

    Triton's interpreter multiplies bf16 operands wrongly (numpy has no bf16): fp32 there.
    """
    names = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return tl.float32 if INTERPRETED else names[dtype]


@triton.jit
def tile(base, first_row, row_stride, row_C, column_E):
    """Pointers to rows first_row (int64) + row_C and columns column_E of a matrix."""
    return base + first_row * row_stride + (row_C[:, None] * row_stride + column_E[None, :])


@triton.jit
def gather(base, row_C, stride, column_E, count, masked: tl.constexpr):
    """Rows row_C of a matrix; zeros for those beyond `count`, of which there are none if not
    masked."""
    pointers = base + row_C.to(tl.int64)[:, None] * stride + column_E[None, :]
    if masked:
        return tl.load(pointers, (row_C < count)[:, None], 0.0)
    return tl.load(pointers)


@triton.jit
def scatter(base, row_C, stride, column_E, count, x_CE):
    """Writes to rows row_C, but for those beyond `count`."""
    pointers = base + row_C.to(tl.int64)[:, None] * stride + column_E[None, :]
    tl.store(pointers, x_CE.to(base.dtype.element_ty), (row_C < count)[:, None])


@triton.jit
def unit_lower_inverse(A_CC, LOW: tl.constexpr = tl.float32):  # type: ignore[assignment]
    """(I + A)^-1 for a strictly lower triangular A [64, 64] fp32.

    The inverse of twice as large diagonal blocks follows from that of the smaller ones:
    (D + O)^-1 = D^-1 - D^-1 O D^-1 for a block diagonal D and what lies below it. Up to 16 rows
    the four diagonal blocks are products of their own.

    LOW is what the products' operands are rounded to: fp32, which tensor cores take as TF32, or
    fp16, which has as many digits and is faster, for entries that are below 65,504.
    """
    block = tl.arange(0, 4)
    row_16 = tl.arange(0, 16)
    own = block[:, None, None, None] == block[None, None, :, None]
    A_4x16x16 = tl.sum(tl.where(own, tl.reshape(A_CC, (4, 16, 4, 16)), 0.0), 2)
    X_4x16x16 = (row_16[:, None] == row_16[None, :]).to(tl.float32)[None, :, :]
    X_4x16x16 = X_4x16x16 - tl.where(_below(row_16, 1)[None, :, :], A_4x16x16, 0.0)
    for half in tl.static_range(1, 4):
        O_4x16x16 = tl.where(_below(row_16, 2**half)[None, :, :], A_4x16x16, 0.0)
        product = tl.dot(X_4x16x16.to(LOW), O_4x16x16.to(LOW), input_precision="tf32")
        product = tl.dot(product.to(LOW), X_4x16x16.to(LOW), input_precision="tf32")
        X_4x16x16 = X_4x16x16 - product
    X_CC = tl.reshape(tl.where(own, X_4x16x16[:, :, None, :], 0.0), (64, 64))
    row_C = tl.arange(0, 64)
    for half in tl.static_range(4, 6):
        O_CC = tl.where(_below(row_C, 2**half), A_CC, 0.0)
        product = tl.dot(X_CC.to(LOW), O_CC.to(LOW), input_precision="tf32")
        X_CC = X_CC - tl.dot(product.to(LOW), X_CC.to(LOW), input_precision="tf32")
    return X_CC


@triton.jit
def _below(row, half: tl.constexpr):
    """Where a block of 2 half rows has its second half's rows and its first half's columns."""
    pair = (row // (2 * half))[:, None] == (row // (2 * half))[None, :]
    return pair & ((row // half)[:, None] > (row // half)[None, :])
