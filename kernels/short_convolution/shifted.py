"""The convolution as a sum of shifted copies; keeps only its input for backward."""

import torch
from torch import Tensor


def short_convolution_shifted(x_TBE: Tensor, weight_EW: Tensor, position_T: Tensor) -> Tensor:
    """Arguments and result of `short_convolution`, without SiLU."""
    return _ShortConvolution.apply(x_TBE, weight_EW, position_T)  # type: ignore[return-value]


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TBE, weight_EW, position_T):
        ctx.save_for_backward(x_TBE, weight_EW, position_T)
        accumulate = torch.promote_types(x_TBE.dtype, torch.float32)
        y_TBE = x_TBE.to(accumulate) * weight_EW[:, 0].to(accumulate)
        for i in range(1, min(weight_EW.shape[1], x_TBE.shape[0])):
            inside = (position_T[i:] >= i)[:, None, None]
            y_TBE[i:] += torch.where(inside, x_TBE[:-i] * weight_EW[:, i].to(accumulate), 0)
        return y_TBE.to(x_TBE.dtype)

    @staticmethod
    def backward(ctx, dy_TBE):  # type: ignore[override]
        x_TBE, weight_EW, position_T = ctx.saved_tensors
        accumulate = torch.promote_types(x_TBE.dtype, torch.float32)
        dy_TBE = dy_TBE.to(accumulate)
        dx_TBE = dy_TBE * weight_EW[:, 0].to(accumulate)
        dweight_EW = torch.zeros_like(weight_EW, dtype=accumulate)
        dweight_EW[:, 0] = (dy_TBE * x_TBE).sum((0, 1))
        for i in range(1, min(weight_EW.shape[1], x_TBE.shape[0])):
            inside = (position_T[i:] >= i)[:, None, None]
            reached_TBE = torch.where(inside, dy_TBE[i:], 0)
            dx_TBE[:-i] += reached_TBE * weight_EW[:, i].to(accumulate)
            dweight_EW[:, i] = (reached_TBE * x_TBE[:-i]).sum((0, 1))
        return dx_TBE.to(x_TBE.dtype), dweight_EW.to(weight_EW.dtype), None
