"""What the layers keep of sequences that are decoded token by token."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Cache:
    """Of every layer, by its number: tensors whose dimension 0 counts the sequences.

    Filled by a forward pass over one whole sequence (prefill); several are stacked and then advance
    together, a token each a step.
    """

    lengths: Tensor
    """[B] int64: tokens that each sequence has so far."""
    layers: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def empty(cls, device: torch.device | str) -> "Cache":
        """For the prefill of one sequence."""
        return cls(torch.zeros(1, dtype=torch.int64, device=device))

    @classmethod
    def stack(cls, caches: list["Cache"]) -> "Cache":
        """Sequences side by side; what grows with a sequence is filled up to the longest."""
        layers = {
            number: {
                name: _pad_and_cat([cache.layers[number][name] for cache in caches])
                for name in tensors
            }
            for number, tensors in caches[0].layers.items()
        }
        return cls(torch.cat([cache.lengths for cache in caches]), layers)

    def append(self, number: int, name: str, rows: Tensor) -> Tensor:
        """Writes a row [B, ...] behind each sequence's own last one; returns all, [B, rows, ...].

        Room is doubled when it is used up, so that a step seldom copies.
        """
        stored = self.layers[number][name]
        needed = int(self.lengths.max()) + 1
        if needed > stored.shape[1]:
            room = stored.new_zeros(stored.shape[0], needed, *stored.shape[2:])
            stored = torch.cat([stored, room], dim=1)
            self.layers[number][name] = stored
        stored[torch.arange(len(rows), device=rows.device), self.lengths] = rows
        return stored[:, :needed]


def _pad_and_cat(tensors: list[Tensor]) -> Tensor:
    longest = max(t.shape[1] for t in tensors)
    return torch.cat(
        [F.pad(t, (0, 0) * (t.dim() - 2) + (0, longest - t.shape[1])) for t in tensors]
    )
