"""The gated sum of two paths on a GPU, in one pass forward and one backward."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
WARPS = 4


def gated_sum(first_THK: Tensor, second_THK: Tensor, gate1_TH: Tensor, gate2_TH: Tensor) -> Tensor:
    """sigmoid(gate1) first + sigmoid(gate2) second, [T, H, K] in their dtype; computed in fp32.

    Args:
        first_THK, second_THK  [T, H, K], K a power of two.
        gate1_TH, gate2_TH     [T, H], one a head, or [T, H K], one a channel; rows may be apart.
    """
    return _GatedSum.apply(first_THK, second_THK, gate1_TH, gate2_TH)  # type: ignore[return-value]


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first_THK, second_THK, gate1_TH, gate2_TH):
        first_THK, second_THK = first_THK.contiguous(), second_THK.contiguous()
        o_THK = torch.empty_like(first_THK)
        grid, sizes = _sizes(first_THK, gate1_TH, gate2_TH)
        windowed_gates_forward_kernel[grid](
            first_THK, second_THK, gate1_TH, gate2_TH, o_THK, **sizes
        )
        ctx.save_for_backward(first_THK, second_THK, gate1_TH, gate2_TH)
        return o_THK

    @staticmethod
    def backward(ctx, do_THK):  # type: ignore[override]
        saved = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved]
        grid, sizes = _sizes(saved[0], *saved[2:])
        windowed_gates_backward_kernel[grid](*saved, do_THK.contiguous(), *grads, **sizes)
        return tuple(grads)


def _sizes(first_THK: Tensor, gate1_TH: Tensor, gate2_TH: Tensor) -> tuple[tuple, dict]:
    T, H, K = first_THK.shape
    sizes = {
        "stride1": gate1_TH.stride(0),
        "stride2": gate2_TH.stride(0),
        "rows": T * H,
        "H": H,
        "K": K,
        "BY_CHANNEL": gate1_TH.shape[1] != H,
        "R": ROWS,
        "num_warps": WARPS,
    }
    return (triton.cdiv(T * H, ROWS),), sizes


@triton.jit(do_not_specialize=["rows", "H"])
def windowed_gates_forward_kernel(
    first_THK,
    second_THK,
    gate1_TH,
    gate2_TH,
    o_THK,
    stride1,
    stride2,
    rows,
    H,
    K: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    R: tl.constexpr,
):
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at_RK = row_R[:, None] * K + tl.arange(0, K)[None, :]
    inside = (row_R < rows)[:, None]
    first_RK = tl.load(first_THK + at_RK, inside, 0.0).to(tl.float32)
    second_RK = tl.load(second_THK + at_RK, inside, 0.0).to(tl.float32)
    width: tl.constexpr = K if BY_CHANNEL else 1  # pyright: ignore[reportAssignmentType]
    gate1_RE = tl.load(_gates(gate1_TH, row_R, stride1, H, width), inside, 0.0).to(tl.float32)
    gate2_RE = tl.load(_gates(gate2_TH, row_R, stride2, H, width), inside, 0.0).to(tl.float32)
    o_RK = tl.sigmoid(gate1_RE) * first_RK + tl.sigmoid(gate2_RE) * second_RK
    tl.store(o_THK + at_RK, o_RK.to(o_THK.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "H"])
def windowed_gates_backward_kernel(
    first_THK,
    second_THK,
    gate1_TH,
    gate2_TH,
    do_THK,
    dfirst_THK,
    dsecond_THK,
    dgate1_TH,
    dgate2_TH,
    stride1,
    stride2,
    rows,
    H,
    K: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    R: tl.constexpr,
):
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at_RK = row_R[:, None] * K + tl.arange(0, K)[None, :]
    inside = (row_R < rows)[:, None]
    width: tl.constexpr = K if BY_CHANNEL else 1  # pyright: ignore[reportAssignmentType]
    do_RK = tl.load(do_THK + at_RK, inside, 0.0).to(tl.float32)
    out_RE = row_R[:, None] * width + tl.arange(0, width)[None, :]

    weight_RE = tl.sigmoid(
        tl.load(_gates(gate1_TH, row_R, stride1, H, width), inside, 0.0).to(tl.float32)
    )
    dweight_RE = do_RK * tl.load(first_THK + at_RK, inside, 0.0).to(tl.float32)
    if not BY_CHANNEL:
        dweight_RE = tl.sum(dweight_RE, 1)[:, None]
    dgate_RE = dweight_RE * weight_RE * (1 - weight_RE)
    tl.store(dgate1_TH + out_RE, dgate_RE.to(dgate1_TH.dtype.element_ty), inside)
    tl.store(dfirst_THK + at_RK, (do_RK * weight_RE).to(dfirst_THK.dtype.element_ty), inside)

    weight_RE = tl.sigmoid(
        tl.load(_gates(gate2_TH, row_R, stride2, H, width), inside, 0.0).to(tl.float32)
    )
    dweight_RE = do_RK * tl.load(second_THK + at_RK, inside, 0.0).to(tl.float32)
    if not BY_CHANNEL:
        dweight_RE = tl.sum(dweight_RE, 1)[:, None]
    dgate_RE = dweight_RE * weight_RE * (1 - weight_RE)
    tl.store(dgate2_TH + out_RE, dgate_RE.to(dgate2_TH.dtype.element_ty), inside)
    tl.store(dsecond_THK + at_RK, (do_RK * weight_RE).to(dsecond_THK.dtype.element_ty), inside)


@triton.jit
def _gates(gate_TH, row_R, stride, H, width: tl.constexpr):
    """Pointers to the `width` gates of each row of H a token."""
    first_R = row_R // H * stride + row_R % H * width
    return gate_TH + first_R[:, None] + tl.arange(0, width)[None, :]
