"""The convolution as its definition, token by token."""

import torch
from torch import Tensor


def short_convolution_reference(x_TBE: Tensor, weight_EW: Tensor, position_T: Tensor) -> Tensor:
    """y_t = sum over i <= min(W - 1, position_t) of weight[:, i] * x_{t-i}."""
    rows = []
    for t, position in enumerate(position_T.tolist()):
        row = torch.zeros_like(x_TBE[0])
        for i in range(min(weight_EW.shape[1], position + 1)):
            row = row + weight_EW[:, i] * x_TBE[t - i]
        rows.append(row)
    return torch.stack(rows)
