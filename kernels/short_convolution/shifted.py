"""The convolution as a sum of shifted copies; keeps only its input for backward."""

import torch
from torch import Tensor


def short_convolution(x_TBE: Tensor, weight_EW: Tensor, position_T: Tensor) -> Tensor:
    """Causal depthwise convolution that does not reach over a document's start.

    y_t = sum over i < W of weight[:, i] * x_{t-i}, where t-i is in t's document.

    Args:
        x_TBE       [T, B, E]  any float dtype; the same documents in every column of B.
        weight_EW   [E, W]     tap i weighs the token i steps back. Products are summed in fp32.
        position_T  [T]        each token's position in its document. It must be below T + 1 steps
                               from the stream's start, i.e. the stream begins a document.
    Returns:
        [T, B, E] in x's dtype.
    Raises:
        ValueError: shapes that do not fit.
    """
    if x_TBE.dim() != 3 or weight_EW.shape[:1] != x_TBE.shape[2:]:
        raise ValueError(f"weight {list(weight_EW.shape)} does not fit x {list(x_TBE.shape)}")
    if position_T.shape != x_TBE.shape[:1]:
        raise ValueError(f"position {list(position_T.shape)} does not fit x {list(x_TBE.shape)}")
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
