"""The rotation on a GPU: one kernel, and its inverse for the gradient; nothing of x is kept."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.split import Place

BLOCK_TOKENS = 16


def rope_triton(
    x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor, place: Place | None = None
) -> Tensor:
    """Arguments and result of `apply_rope`; x may be a slice of wider rows."""
    return _Rope.apply(x_THK, cos_TR, sin_TR, place)  # type: ignore[return-value]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THK, cos_TR, sin_TR, place):
        ctx.save_for_backward(cos_TR, sin_TR)
        ctx.place = place
        return _rotate(x_THK, cos_TR, sin_TR, 1.0, x_THK.new_empty(x_THK.shape))

    @staticmethod
    def backward(ctx, dy_THK):  # type: ignore[override]
        dx_THK = dy_THK.new_empty(dy_THK.shape) if ctx.place is None else ctx.place()
        return _rotate(dy_THK, *ctx.saved_tensors, -1.0, dx_THK), None, None, None


def _rotate(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor, sign: float, y_THK: Tensor) -> Tensor:
    """Fills y, whose heads are dense, and gives it back."""
    if x_THK.stride(2) != 1:
        x_THK = x_THK.contiguous()
    T, H, K = x_THK.shape
    rotate(
        (triton.cdiv(T, BLOCK_TOKENS),),
        x_THK,
        cos_TR,
        sin_TR,
        y_THK,
        T,
        x_THK.stride(0),
        x_THK.stride(1),
        y_THK.stride(0),
        sign,
        H=H,
        R=K // 2,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_R=triton.next_power_of_2(K // 2),
        num_warps=4,
    )
    return y_THK


@triton.jit
def rope_kernel(
    x,
    cos_TR,
    sin_TR,
    y,
    T,
    x_token,
    x_head,
    y_token,
    sign,
    H: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """All heads of BLOCK_T tokens, rotated by their angles (sign 1) or back (sign -1)."""
    t_T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    r_R = tl.arange(0, BLOCK_R)
    inside_TR = (t_T < T)[:, None] & (r_R < R)[None, :]
    angle = t_T[:, None] * R + r_R[None, :]
    cos = tl.load(cos_TR + angle, inside_TR, 0.0)
    sin = tl.load(sin_TR + angle, inside_TR, 0.0) * sign
    for h in range(H):
        source = x + t_T[:, None] * x_token + h * x_head + r_R[None, :]
        first = tl.load(source, inside_TR, 0.0).to(tl.float32)
        second = tl.load(source + R, inside_TR, 0.0).to(tl.float32)
        target = y + t_T[:, None] * y_token + h * 2 * R + r_R[None, :]
        low, high = first * cos - second * sin, second * cos + first * sin
        tl.store(target, low.to(y.dtype.element_ty), inside_TR)
        tl.store(target + R, high.to(y.dtype.element_ty), inside_TR)


rotate = Launched(rope_kernel)
