"""Head widths and layer kinds from measured ranks."""

import math
from dataclasses import dataclass

from mixtron.launch.spectral.mappings import Layer, linearised, narrowed
from mixtron.launch.spectral.report import Spectra
from mixtron.launch.spectral.variant import Variant
from mixtron.launch.spectral.weights import SpectralError
from mixtron.megatron_ext.mixers.base import MixerConfig
from mixtron.megatron_ext.mixers.kla.config import Config as KLA
from mixtron.megatron_ext.mixers.sd_attention.config import Config as SDAttention
from mixtron.megatron_ext.mixers.softmax_attention.config import Config as SoftmaxAttention

MULTIPLE = 8
"""Of a head's width: what the kernels want."""


@dataclass(frozen=True)
class Allocation:
    """What one layer gets."""

    layer: int
    rank: float
    """Measured: the mean over heads of the routing rank; of softmax attention, of the larger one of
    routing and filtering."""
    before: int
    width: int
    linear: bool = False
    """At or below the threshold: linear attention or KLA in its place."""


def allocate(
    variant: Variant, spectra: Spectra, margin: float, threshold: float | None
) -> list[Allocation]:
    """For every measured layer the width that holds `margin` times its rank; no wider than before.

    With a threshold, layers up to it are made linear and the others stay as they are.
    """
    found = []
    for layer, heads in spectra.heads.items():
        mixer = variant.mixers[layer]
        assert isinstance(mixer, SDAttention | SoftmaxAttention)
        sd = isinstance(mixer, SDAttention)
        ranks = [h.routing_rank if sd else max(h.routing_rank, h.filtering_rank) for h in heads]
        rank = sum(ranks) / len(ranks)
        before = mixer.head_dim
        if threshold is not None:
            found.append(Allocation(layer, rank, before, before, rank <= threshold))
            continue
        width = max(MULTIPLE, math.ceil(margin * rank / MULTIPLE) * MULTIPLE)
        found.append(Allocation(layer, rank, before, min(before, width)))
    return found


def allocated(variant: Variant, plan: list[Allocation], linear: str, initialise: bool) -> Variant:
    """The smaller model. Without `initialise` every weight of a changed layer is drawn anew.

    Raises:
        SpectralError: weights that cannot be mapped (RoPE, or KLA, which has others).
    """
    for item in plan:
        if item.linear:
            change = _linear(linear, initialise)
        elif item.width < item.before:
            change = _narrow(item.width, initialise)
        else:
            continue
        variant = variant.with_layers(change, [item.layer])
    return variant


def _narrow(width: int, initialise: bool):
    if initialise:
        return lambda layer: narrowed(layer, width)
    return lambda layer: _anew(layer, layer.attention().model_copy(update={"head_dim": width}))


def _linear(kind: str, initialise: bool):
    if kind == "kla":
        if initialise:
            raise SpectralError(
                "KLA has decays and gates that attention has not: leave out "
                "--initialise, or use --linear linear_attention"
            )
        return lambda layer: _anew(layer, _kla(layer))
    return linearised if initialise else lambda layer: _anew(layer, linearised(layer).mixer)


def _kla(layer: Layer) -> MixerConfig:
    mixer = layer.attention()
    return KLA(
        heads=mixer.heads,
        value_heads=mixer.heads,
        key_dim=mixer.head_dim,
        value_dim=mixer.head_dim,
    )


def _anew(layer: Layer, mixer: MixerConfig) -> Layer:
    return Layer(mixer, {}, layer.gain_D)
