"""Parts of wider rows in one piece. torch copies such rows at a third of the memory's speed."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.triton_tools import Form, form_for

TILE_ELEMENTS = 4096


def dense(x: Tensor, *, backend: Form | None = None) -> Tensor:
    """x in one piece, whose gradient is x's as it comes.

    Args:
        x        [..., N]  bf16, fp16 or fp32; torch's form also others.
        backend  torch or triton; None: triton on a GPU, torch elsewhere.
    """
    if x.is_contiguous() or x.stride(-1) != 1 or form_for(x, backend) == "torch":
        return x.contiguous()
    return _Dense.apply(x)  # type: ignore[return-value]


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x_RN = x.flatten(0, -2)
        rows, N = x_RN.shape
        block = triton.next_power_of_2(N)
        per_program = max(1, TILE_ELEMENTS // block)
        copy(
            (triton.cdiv(rows, per_program),),
            *(x_RN, y, rows),
            ROW=x_RN.stride(0), N=N, BLOCK_N=block, ROWS=per_program, num_warps=4,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return dy


@triton.jit
def dense_copy_kernel(
    x, y, rows,
    ROW: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The stride is a constant: so the compiler knows how far it lets loads be wide."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_N = tl.arange(0, BLOCK_N)
    inside_RN = (row_R < rows)[:, None] & (column_N < N)[None, :]
    x_RN = tl.load(x + row_R[:, None] * ROW + column_N[None, :], inside_RN)
    tl.store(y + row_R[:, None] * N + column_N[None, :], x_RN, inside_RN)


copy = Launched(dense_copy_kernel)
