"""A softmax-attention layer's weights as those of a PaTH layer, to be trained on."""

import torch
from torch import Tensor

from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.path.config import Config as PathConfig
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxConfig

BETA_BIAS = -6.0
"""beta = 2 sigmoid(-6) = 0.005: every map starts close to the identity."""
FORGET_BIAS = 10.0
"""f = sigmoid(10) = 1 - 5e-5: a thousand tokens lose 5 % of their weight."""
KEPT = ("heads", "kv_heads", "head_dim", "qk_norm")


def softmax_to_path(
    weights: dict[str, Tensor],
    source: SoftmaxConfig,
    target: PathConfig,
    *,
    init_std: float,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """What is common is kept, RoPE dropped; u = 0 and b = -6, so that beta starts near 0.

    Without RoPE the layer computes nearly what it did; with it, training has to make up for the
    positions that it loses.

    Args:
        weights: of one layer, at full size, by checkpoint key (a fused projection by component:
            `in_proj.weight.query`).
        init_std: of the new matrices' normal distribution, drawn from `generator`.
    Returns:
        Every weight of the PaTH layer, by checkpoint key.
    Raises:
        ConfigError: layers whose heads differ, or windowed attention.
    """
    for field in KEPT:
        ours, theirs = getattr(target, field), getattr(source, field)
        if ours != theirs:
            raise ConfigError(f"{field}={ours} of the path mixer: the softmax layer has {theirs}")
    if source.window is not None:
        raise ConfigError(f"window={source.window} of the softmax layer: path attends to all")
    matrix = weights["in_proj.weight.query"]
    width, (_, kv) = matrix.shape[1], target.widths()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).mul(init_std).to(matrix)

    def fp32(size: int, value: float) -> Tensor:
        return torch.full((size,), value, device=matrix.device)

    bound = target.taps**-0.5
    taps = (2 * torch.rand(kv, target.taps, generator=generator) - 1) * bound
    new = {
        "in_proj.weight.householder": draw(target.rank, width),
        "in_proj.weight.beta": matrix.new_zeros(target.kv_heads, width),
        "householder_weight": draw(kv, target.rank),
        "convolution.weight.householder": taps.to(matrix),
        "beta_bias": fp32(target.kv_heads, BETA_BIAS),
    }
    if target.gated:
        new["in_proj.weight.forget"] = matrix.new_zeros(target.heads, width)
        new["forget_bias"] = fp32(target.heads, FORGET_BIAS)
    return weights | new
