"""What a model loses with a part of its attention: perplexity of each ablation, and its weights."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mixtron.launch.data import AnyValidation
from mixtron.launch.micro_batch import collate
from mixtron.launch.spectral.mappings import (
    truncated,
    with_damping,
    without_filtering,
    without_routing,
)
from mixtron.launch.spectral.variant import Variant, build
from mixtron.launch.spectral.weights import SpectralError
from mixtron.megatron_ext.model import forward
from mixtron.megatron_ext.parallel import Ranks

Ablation = Callable[[], Variant]
SAMPLES = 16
"""Of the validation set, over which d is averaged."""


def ablations(
    variant: Variant, ranks_kept: list[int], ranks: Ranks, validation: dict[str, AnyValidation]
) -> tuple[dict[str, Ablation], list[str]]:
    """What can be done to this model, by name, and what cannot, with the reason.

    S-D layers: routing (S), filtering (D), D averaged to one number a head, and S of one layer
    after the other truncated. Softmax layers: the skew or the symmetric part of the scores.
    """
    types = {i: mixer.type for i, mixer in enumerate(variant.mixers)}
    sd_layers = [i for i, kind in types.items() if kind == "sd_attention"]
    numbers = [i for i, kind in types.items() if kind in ("sd_attention", "softmax_attention")]
    found: dict[str, Ablation] = {
        "no-routing": partial(variant.with_layers, without_routing, numbers),
        "no-filtering": partial(variant.with_layers, without_filtering, numbers),
    }
    if sd_layers:
        found["mean-damping"] = partial(with_mean_damping, variant, ranks, validation)
    for number in sd_layers:
        for rank in ranks_kept:
            cut = partial(truncated, rank=rank)
            found[f"layer-{number}-rank-{rank}"] = partial(variant.with_layers, cut, [number])
    possible, refused = {}, {}
    for name, make in found.items():
        try:
            if name != "mean-damping":
                make()
            possible[name] = make
        except SpectralError as error:
            refused.setdefault(str(error), []).append(name)
    return possible, [f"{', '.join(names)}: {reason}" for reason, names in refused.items()]


def with_mean_damping(
    variant: Variant, ranks: Ranks, validation: dict[str, AnyValidation]
) -> Variant:
    """Each head's d replaced by its mean over text."""
    for number, d_H in dict(_mean_damping(variant, ranks, validation)).items():
        bias_H = d_H + torch.log(-torch.expm1(-d_H))  # softplus^-1
        variant = variant.with_layers(partial(with_damping, bias_H=bias_H), [number])
    return variant


@torch.no_grad()
def _mean_damping(
    variant: Variant, ranks: Ranks, validation: dict[str, AnyValidation]
) -> Iterator[tuple[int, Tensor]]:
    """By layer of S-D attention: d [H], averaged over tokens."""
    chunk: Any = build(variant, ranks)
    chunk.eval()
    modules = [layer.self_attention for layer in chunk.decoder.layers]
    modules = [m for m in modules if m.mixer.type == "sd_attention"]
    sums = {module.layer_number - 1: [] for module in modules}

    def collect(module, arguments, keywords):
        *_, d_TH = module.attention_inputs(arguments[0], keywords["packed_seq_params"])
        sums[module.layer_number - 1].append(d_TH.mean(0))

    for module in modules:
        module.register_forward_pre_hook(collect, with_kwargs=True)
    data = next(iter(validation.values()))
    for i in range(min(SAMPLES, len(data))):
        micro = collate([data.read(i)], 0, ranks)
        forward(chunk, variant.config.model, ranks, micro.tokens_BT, micro.batch)
    for number, means in sums.items():
        yield number, torch.stack(means).mean(0)
