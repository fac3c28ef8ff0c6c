"""The gates on a GPU: a tile of tokens of all heads at a time.

g = -exp(r) softplus(a + b),   eta = sigmoid(s)
da = -dg exp(r) sigmoid(a + b),   db = sum da,   dr = sum dg g,   ds = deta eta (1 - eta)
"""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.split import place_of

BLOCK_TOKENS = 128


def gates_triton(decay_TBJ: Tensor, step_TBJ: Tensor, rate_J: Tensor, bias_J: Tensor) -> tuple:
    """Arguments and results of `decay_and_step_size`."""
    if decay_TBJ.shape[1] != 1 or step_TBJ.shape != decay_TBJ.shape:
        raise ValueError(
            f"decay {list(decay_TBJ.shape)} and step {list(step_TBJ.shape)}: the triton form takes "
            "two of one shape [T, 1, J]"
        )
    places = place_of(decay_TBJ), place_of(step_TBJ)
    return _Gates.apply(decay_TBJ.squeeze(1), step_TBJ.squeeze(1), rate_J, bias_J, places)  # type: ignore[return-value]


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, decay_TJ, step_TJ, rate_J, bias_J, places):
        ctx.places = places
        decay_TJ, step_TJ = _dense_rows(decay_TJ), _dense_rows(step_TJ)
        ctx.save_for_backward(decay_TJ, step_TJ, rate_J, bias_J)
        T, J = decay_TJ.shape
        log_decay_BTJ, eta_BTJ = rate_J.new_empty(2, 1, T, J)
        launch_forward(
            (triton.cdiv(T, BLOCK_TOKENS),),
            decay_TJ,
            step_TJ,
            rate_J,
            bias_J,
            log_decay_BTJ,
            eta_BTJ,
            T,
            decay_TJ.stride(0),
            step_TJ.stride(0),
            J=J,
            BLOCK_J=triton.next_power_of_2(J),
            BLOCK_T=BLOCK_TOKENS,
            num_warps=4,
        )
        return log_decay_BTJ, eta_BTJ

    @staticmethod
    def backward(ctx, dlog_decay_BTJ, deta_BTJ):  # type: ignore[override]
        decay_TJ, step_TJ, rate_J, bias_J = ctx.saved_tensors
        T, J = decay_TJ.shape
        ddecay_TJ, dstep_TJ = (
            decay_TJ.new_empty(T, J) if place is None else place().squeeze(1)
            for place in ctx.places
        )
        programs = triton.cdiv(T, BLOCK_TOKENS)
        partial_P2J = rate_J.new_empty(programs, 2, J)
        launch_backward(
            (programs,),
            decay_TJ,
            step_TJ,
            rate_J,
            bias_J,
            dlog_decay_BTJ.contiguous(),
            deta_BTJ.contiguous(),
            ddecay_TJ,
            dstep_TJ,
            partial_P2J,
            T,
            decay_TJ.stride(0),
            step_TJ.stride(0),
            ddecay_TJ.stride(0),
            dstep_TJ.stride(0),
            J=J,
            BLOCK_J=triton.next_power_of_2(J),
            BLOCK_T=BLOCK_TOKENS,
            num_warps=4,
        )
        drate_J, dbias_J = partial_P2J.sum(0)
        return ddecay_TJ, dstep_TJ, drate_J, dbias_J, None


def _dense_rows(x_TJ: Tensor) -> Tensor:
    return x_TJ if x_TJ.stride(1) == 1 else x_TJ.contiguous()


@triton.jit
def _softplus(x):
    """log(1 + e^x); of a small e^x, exact: the error of 1 + e^x divides out."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1 + e
    small = tl.where(u == 1, e, tl.log(u) * e / tl.where(u == 1, 1.0, u - 1))
    return tl.where(x > 20, x, small)


@triton.jit
def gates_forward_kernel(
    decay,
    step,
    rate,
    bias,
    log_decay,
    eta,
    T,
    decay_row,
    step_row,
    J: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head_J = tl.arange(0, BLOCK_J)
    inside_TJ = (t_T < T)[:, None] & (head_J < J)[None, :]
    row_T = t_T.to(tl.int64)
    a_TJ = tl.load(decay + row_T[:, None] * decay_row + head_J[None, :], inside_TJ, 0.0)
    s_TJ = tl.load(step + row_T[:, None] * step_row + head_J[None, :], inside_TJ, 0.0)
    r_J = tl.load(rate + head_J, head_J < J, 0.0)
    b_J = tl.load(bias + head_J, head_J < J, 0.0)
    g_TJ = -tl.exp(r_J)[None, :] * _softplus(a_TJ.to(tl.float32) + b_J[None, :])
    out = row_T[:, None] * J + head_J[None, :]
    tl.store(log_decay + out, g_TJ, inside_TJ)
    tl.store(eta + out, tl.sigmoid(s_TJ.to(tl.float32)), inside_TJ)


@triton.jit
def gates_backward_kernel(
    decay,
    step,
    rate,
    bias,
    dlog_decay,
    deta,
    ddecay,
    dstep,
    partial,
    T,
    decay_row,
    step_row,
    ddecay_row,
    dstep_row,
    J: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head_J = tl.arange(0, BLOCK_J)
    inside_TJ = (t_T < T)[:, None] & (head_J < J)[None, :]
    row_T = t_T.to(tl.int64)
    a_TJ = tl.load(decay + row_T[:, None] * decay_row + head_J[None, :], inside_TJ, 0.0)
    s_TJ = tl.load(step + row_T[:, None] * step_row + head_J[None, :], inside_TJ, 0.0)
    r_J = tl.load(rate + head_J, head_J < J, 0.0)
    b_J = tl.load(bias + head_J, head_J < J, 0.0)
    out = row_T[:, None] * J + head_J[None, :]
    dg_TJ = tl.load(dlog_decay + out, inside_TJ, 0.0)
    deta_TJ = tl.load(deta + out, inside_TJ, 0.0)
    x_TJ, factor_1J = a_TJ.to(tl.float32) + b_J[None, :], -tl.exp(r_J)[None, :]
    da_TJ = dg_TJ * factor_1J * tl.sigmoid(x_TJ)
    eta_TJ = tl.sigmoid(s_TJ.to(tl.float32))
    own = ddecay + row_T[:, None] * ddecay_row + head_J[None, :]
    tl.store(own, da_TJ.to(ddecay.dtype.element_ty), inside_TJ)
    ds_TJ = deta_TJ * eta_TJ * (1 - eta_TJ)
    own = dstep + row_T[:, None] * dstep_row + head_J[None, :]
    tl.store(own, ds_TJ.to(dstep.dtype.element_ty), inside_TJ)
    own = partial + tl.program_id(0) * 2 * J + head_J
    tl.store(own, tl.sum(dg_TJ * factor_1J * _softplus(x_TJ), 0), head_J < J)
    tl.store(own + J, tl.sum(da_TJ, 0), head_J < J)


launch_forward, launch_backward = Launched(gates_forward_kernel), Launched(gates_backward_kernel)
