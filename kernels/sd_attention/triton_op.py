"""S-D attention on a GPU: launches the kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.sd_attention.triton_backward import sd_delta_kernel, sd_gradient_kernel
from mixtron.kernels.sd_attention.triton_forward import sd_forward_kernel
from mixtron.kernels.triton_tools import check_takes, product_dtype
from mixtron.kernels.windowed_attention.permutation import document_bounds

launch_forward, launch_gradient = Launched(sd_forward_kernel), Launched(sd_gradient_kernel)
launch_delta = Launched(sd_delta_kernel)
DELTA_TOKENS = 64


@dataclass(frozen=True)
class Launch:
    own: int
    """Tokens of a program's own."""
    others: int
    """Tokens that they meet at a time."""
    warps: int
    stages: int


@dataclass(frozen=True)
class Launches:
    forward: Launch
    gradient: Launch


LAUNCHES = {
    64: Launches(forward=Launch(128, 64, 8, 3), gradient=Launch(128, 64, 8, 2)),
    128: Launches(forward=Launch(128, 64, 8, 2), gradient=Launch(64, 64, 8, 2)),
}
"""By the wider of K and V; no search at run time, which would let ranks differ."""


def check(q_THK: Tensor, v_THV: Tensor, scale: float) -> None:
    """Raises ValueError for what the kernels cannot take."""
    if scale <= 0:
        raise ValueError(f"scale is {scale}: the triton form takes a positive one")
    check_takes(q_THK, v_THV, "q_THK")


class TritonSDAttention(torch.autograd.Function):
    """(q, k, v, d, cu_seqlens, scale) to o. Keeps its inputs, o and the log-sum-exp [H, T] for
    backward."""

    @staticmethod
    def forward(ctx, q_THK, k_THK, v_THV, d_TH, cu_seqlens, scale):
        q_THK, k_THK, v_THV = (_dense_rows(x) for x in (q_THK, k_THK, v_THV))
        inputs = (q_THK, k_THK, v_THV, d_TH.contiguous())
        bounds = [x.int() for x in document_bounds(cu_seqlens, len(q_THK))]
        o_THV, lse_HT = attend(*inputs, bounds[0], scale, launches(q_THK, v_THV).forward)
        ctx.save_for_backward(*inputs, o_THV, lse_HT, *bounds)
        ctx.scale = scale
        return o_THV

    @staticmethod
    def backward(ctx, do_THV):  # type: ignore[override]
        q_THK, k_THK, v_THV, d_TH, o_THV, lse_HT, *bounds = ctx.saved_tensors
        inputs = (q_THK, k_THK, v_THV, d_TH)
        launch = launches(q_THK, v_THV).gradient
        found = gradients(*inputs, o_THV, do_THV.contiguous(), lse_HT, *bounds, ctx.scale, launch)
        return *found, None, None


def attend(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    d_TH: Tensor,
    start_T: Tensor,
    scale: float,
    launch: Launch,
) -> tuple[Tensor, Tensor]:
    """o [T, H, V] and the log-sum-exp [H, T] fp32."""
    (T, H, _), V = q_THK.shape, v_THV.shape[2]
    o_THV = q_THK.new_empty(T, H, V)
    lse_HT = q_THK.new_empty(H, T, dtype=torch.float32)
    launch_forward(
        (H * triton.cdiv(T, launch.own),),
        q_THK,
        k_THK,
        v_THV,
        d_TH,
        start_T,
        o_THV,
        lse_HT,
        scale,
        T,
        **_shapes(q_THK, k_THK, v_THV),
        Q=launch.own,
        S=launch.others,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return o_THV, lse_HT


def gradients(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    d_TH: Tensor,
    o_THV: Tensor,
    do_THV: Tensor,
    lse_HT: Tensor,
    start_T: Tensor,
    end_T: Tensor,
    scale: float,
    launch: Launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dd."""
    (T, H, _), V = q_THK.shape, v_THV.shape[2]
    delta_HT, dd_TH = torch.empty_like(lse_HT), torch.empty_like(d_TH)
    grid = (H * triton.cdiv(T, DELTA_TOKENS),)
    launch_delta(grid, o_THV, do_THV, delta_HT, T, H=H, V=V, C=DELTA_TOKENS, num_warps=4)
    dq_THK, dk_THK, dv_THV = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THK, k_THK, v_THV)
    )
    launch_gradient(
        (H * triton.cdiv(T, launch.own),),
        q_THK,
        k_THK,
        v_THV,
        d_TH,
        do_THV,
        start_T,
        end_T,
        lse_HT,
        delta_HT,
        dq_THK,
        dk_THK,
        dv_THV,
        dd_TH,
        scale,
        T,
        **_shapes(q_THK, k_THK, v_THV),
        C=launch.own,
        S=launch.others,
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return dq_THK, dk_THK, dv_THV, dd_TH


def launches(q_THK: Tensor, v_THV: Tensor) -> Launches:
    return LAUNCHES[64 if max(q_THK.shape[-1], v_THV.shape[-1]) <= 64 else 128]


def _dense_rows(x_THK: Tensor) -> Tensor:
    """As it is where each row's heads lie one after the other, as in a view of a projection."""
    _, _, K = x_THK.shape
    return x_THK if x_THK.stride()[1:] == (K, 1) else x_THK.contiguous()


def _shapes(q_THK: Tensor, k_THK: Tensor, v_THV: Tensor) -> dict:
    return {
        "q_stride": q_THK.stride(0),
        "k_stride": k_THK.stride(0),
        "v_stride": v_THV.stride(0),
        "H": q_THK.shape[1],
        "K": q_THK.shape[2],
        "V": v_THV.shape[2],
        "PRODUCT": product_dtype(q_THK.dtype),
    }
