"""The norms of layers, and a mixer's gated norm."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mixtron.kernels.norms import (
    add_rms_norm,
    add_rms_norm_factor,
    by_token,
    gated_norm_factor,
    rms_norm,
)
from mixtron.kernels.split import viewed
from mixtron.megatron_ext.parameters import constant, declare


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 inside. Works under sequence parallelism.

    There each rank sees its share of the tokens, so the weight's gradient is partial; its mark
    makes Megatron sum it at the end of the step.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = _of_channels(config, hidden_size, 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class ResidualNorm(RMSNorm):
    """Of the residual stream, to which a branch's output may be added in the same kernel."""

    def forward(self, hidden: Tensor, added: Tensor | None = None, *, factor: bool = False) -> Any:  # type: ignore[override]
        """(hidden + added, its norm); or its norm as a factor, beside which is the sum."""
        compute = add_rms_norm_factor if factor else add_rms_norm
        return compute(hidden, added, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias. Under sequence parallelism as RMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = _of_channels(config, hidden_size, 1.0)
        self.bias = _of_channels(config, hidden_size, 0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


def _of_channels(config: TransformerConfig, hidden_size: int, start: float) -> nn.Parameter:
    """A norm's parameter, with the mark that makes Megatron sum it under sequence parallelism."""
    empty = torch.empty(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
    parameter = declare(nn.Parameter(empty), constant(start))
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def gated_norm(
    o_BTJV: Tensor, weight_V: Tensor, eps: float, gate_TBE: Tensor, *, factor: bool = False
) -> Any:
    """RMSNorm of each value head times SiLU(gate), [T, B, J V]; or a product's factor of it."""
    heads = o_BTJV.shape[2:]
    gate_BTJV, place = viewed(gate_TBE, lambda x: x.transpose(0, 1).unflatten(-1, heads))
    if factor:
        return gated_norm_factor(o_BTJV, weight_V, gate_BTJV, eps, gate_place=place)
    return by_token(rms_norm(o_BTJV, weight_V, eps, gate=gate_BTJV, gate_place=place))
