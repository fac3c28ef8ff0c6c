"""The norms as their definitions."""

import torch
from torch import Tensor


def rms_norm_reference(
    x: Tensor, weight_N: Tensor, eps: float, *, gate: Tensor | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, times gate * sigmoid(gate) where there is a gate."""
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight_N
    return y if gate is None else y * gate * torch.sigmoid(gate)


def unit_norm_reference(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x / max(|x|, eps)."""
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp_min(eps)
