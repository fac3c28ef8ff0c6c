"""Where heads are read from: one layer at a time, so that a model need not fit into memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


class SpectralError(Exception):
    """A model that cannot be measured. The message names the file."""

    exit_code = 2


@dataclass(frozen=True)
class LayerWeights:
    """The query and key weights of one layer's heads, its input norm's gain folded in."""

    layer: int
    """From 0."""
    q_HKD: Tensor
    k_HKD: Tensor
    """Repeated over the query heads that share a key head."""
    sd: bool = False
    """S-D attention: M = W_Q^T W_K - W_K^T W_Q."""
    notes: tuple[str, ...] = ()
    """What scores depend on besides these weights."""


@dataclass(frozen=True)
class Model:
    """Opened, nothing read yet."""

    name: str
    family: str
    layers: int
    skipped: dict[int, str] = field(default_factory=dict)
    """Layers without queries and keys of attention, and what they are."""
    read: Callable[[int], LayerWeights] = field(kw_only=True)

    def __iter__(self) -> Iterator[LayerWeights]:
        for layer in range(self.layers):
            if layer not in self.skipped:
                yield self.read(layer)


def to_heads(weight_ED: Tensor, heads: int, gain_D: Tensor | None) -> Tensor:
    """[H K, D] to [H, K, D] in fp64, its columns times the norm's gain."""
    weight_HKD = weight_ED.to(torch.float64).unflatten(0, (heads, -1))
    return weight_HKD if gain_D is None else weight_HKD * gain_D.to(torch.float64)


def repeat_to(k_GKD: Tensor, heads: int) -> Tensor:
    return k_GKD.repeat_interleave(heads // k_GKD.shape[0], dim=0)
