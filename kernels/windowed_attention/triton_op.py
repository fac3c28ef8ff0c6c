"""Windowed attention on a GPU: launches the kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

from dataclasses import dataclass

import torch
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.triton_tools import check_takes, product_dtype
from mixtron.kernels.windowed_attention.plan import TileLists, WindowPlan
from mixtron.kernels.windowed_attention.triton_backward import (
    windowed_key_gradients_kernel,
    windowed_query_gradient_kernel,
)
from mixtron.kernels.windowed_attention.triton_forward import windowed_forward_kernel

launch_forward = Launched(windowed_forward_kernel)
launch_query_gradient = Launched(windowed_query_gradient_kernel)
launch_key_gradients = Launched(windowed_key_gradients_kernel)


@dataclass(frozen=True)
class Launch:
    warps: int
    stages: int


@dataclass(frozen=True)
class Launches:
    forward: Launch
    query_gradient: Launch
    key_gradients: Launch


LAUNCHES = {
    64: Launches(Launch(4, 3), Launch(4, 3), Launch(4, 3)),
    128: Launches(Launch(4, 3), Launch(4, 3), Launch(4, 2)),
}
"""By the wider of K and V; no search at run time, which would let ranks differ."""


def check(q_THK: Tensor, v_SGV: Tensor, scale: float) -> None:
    """Raises ValueError for what the kernels cannot take."""
    if scale <= 0:
        raise ValueError(f"scale is {scale}: the triton form takes a positive one")
    check_takes(q_THK, v_SGV, "q_THK")


class TritonAttention(torch.autograd.Function):
    """(q, k, v, plan, scale) to o. Keeps its inputs, o and the log-sum-exp [H, slots] for
    backward."""

    @staticmethod
    def forward(ctx, q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, plan: WindowPlan, scale: float):
        q_THK, k_SGK, v_SGV = (_dense_rows(x) for x in (q_THK, k_SGK, v_SGV))
        launch = launches(q_THK, v_SGV)
        o_THV, lse_HT = attend(q_THK, k_SGK, v_SGV, plan, scale, launch.forward)
        ctx.save_for_backward(q_THK, k_SGK, v_SGV, o_THV, lse_HT)
        ctx.plan, ctx.scale = plan, scale
        return o_THV

    @staticmethod
    def backward(ctx, *grads):
        do_THV = grads[0].contiguous()
        q_THK, k_SGK, v_SGV, o_THV, lse_HT = ctx.saved_tensors
        inputs, options = (q_THK, k_SGK, v_SGV), (ctx.plan, ctx.scale)
        launch = launches(q_THK, v_SGV)
        dq_THK, delta_HT = query_gradient(
            *inputs, o_THV, do_THV, lse_HT, *options, launch.query_gradient
        )
        dk_SGK, dv_SGV = key_gradients(
            *inputs, do_THV, lse_HT, delta_HT, *options, launch.key_gradients
        )
        return dq_THK, dk_SGK, dv_SGV, None, None


def attend(
    q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, plan: WindowPlan, scale: float, launch: Launch
) -> tuple[Tensor, Tensor]:
    """o [T, H, V] and the log-sum-exp [H, slots] fp32."""
    T, H, _ = q_THK.shape
    o_THV = q_THK.new_empty(T, H, v_SGV.shape[2])
    lse_HT = q_THK.new_empty(H, plan.queries.slot_NC.numel(), dtype=torch.float32)
    launch_forward(
        (H * len(plan.queries.slot_NC),),
        q_THK,
        k_SGK,
        v_SGV,
        o_THV,
        lse_HT,
        *_planned(plan, plan.keys_of_queries, scale),
        **_shapes(q_THK, k_SGK, v_SGV, plan),
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return o_THV, lse_HT


def query_gradient(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    o_THV: Tensor,
    do_THV: Tensor,
    lse_HT: Tensor,
    plan: WindowPlan,
    scale: float,
    launch: Launch,
) -> tuple[Tensor, Tensor]:
    """dq and delta = do . o, [H, slots] fp32."""
    dq_THK, delta_HT = _like(q_THK), torch.empty_like(lse_HT)
    launch_query_gradient(
        (q_THK.shape[1] * len(plan.queries.slot_NC),),
        q_THK,
        k_SGK,
        v_SGV,
        o_THV,
        do_THV,
        lse_HT,
        delta_HT,
        dq_THK,
        *_planned(plan, plan.keys_of_queries, scale),
        **_shapes(q_THK, k_SGK, v_SGV, plan),
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return dq_THK, delta_HT


def key_gradients(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    do_THV: Tensor,
    lse_HT: Tensor,
    delta_HT: Tensor,
    plan: WindowPlan,
    scale: float,
    launch: Launch,
) -> tuple[Tensor, Tensor]:
    """dk and dv."""
    dk_SGK, dv_SGV = _like(k_SGK), _like(v_SGV)
    launch_key_gradients(
        (k_SGK.shape[1] * len(plan.keys.slot_NC),),
        q_THK,
        k_SGK,
        v_SGV,
        do_THV,
        lse_HT,
        delta_HT,
        dk_SGK,
        dv_SGV,
        *_planned(plan, plan.queries_of_keys, scale),
        **_shapes(q_THK, k_SGK, v_SGV, plan),
        STAGES=launch.stages,
        num_warps=launch.warps,
    )
    return dk_SGK, dv_SGV


def launches(q_THK: Tensor, v_SGV: Tensor) -> Launches:
    return LAUNCHES[64 if max(q_THK.shape[-1], v_SGV.shape[-1]) <= 64 else 128]


def _dense_rows(x_THK: Tensor) -> Tensor:
    """As it is where each row's heads lie one after the other, as in a view of a projection."""
    _, _, K = x_THK.shape
    return x_THK if x_THK.stride()[1:] == (K, 1) else x_THK.contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _planned(plan: WindowPlan, lists: TileLists, scale: float) -> tuple:
    """The kernels' arguments from `query_row` to `slots`."""
    queries, keys = plan.queries, plan.keys
    return (
        queries.row_NC,
        queries.slot_NC,
        queries.token_NC,
        queries.start_NC,
        keys.row_NC,
        keys.slot_NC,
        keys.token_NC,
        lists.tiles_NM,
        lists.count_N,
        lists.whole_N,
        scale,
        plan.before,
        plan.before + plan.after,
        queries.rows,
        keys.rows,
        lists.tiles_NM.shape[1],
        queries.slot_NC.numel(),
    )


def _shapes(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor, plan: WindowPlan) -> dict:
    return {
        "q_stride": q_THK.stride(0),
        "k_stride": k_SGK.stride(0),
        "v_stride": v_SGV.stride(0),
        "H": q_THK.shape[1],
        "G": k_SGK.shape[1],
        "K": q_THK.shape[2],
        "V": v_SGV.shape[2],
        "Q": plan.queries.tile,
        "S": plan.keys.tile,
        "PLAIN": plan.plain,
        "PRODUCT": product_dtype(q_THK.dtype),
    }
