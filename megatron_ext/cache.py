"""What the layers keep of sequences that are decoded token by token."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass
class Cache:
    """Of every layer, by its number: tensors whose dimension 0 counts the sequences.

    Filled by a forward pass over a stream of whole sequences, the documents of one batch (prefill);
    then they advance together, a token each a step.
    """

    lengths: Tensor
    """[B] int64: tokens that each sequence has so far; in prefill, when it is done."""
    layers: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def stack(cls, caches: list["Cache"]) -> "Cache":
        """The sequences of several streams; what grows with one is filled up to the longest."""
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


def side_by_side(rows_TE: Tensor, lengths: list[int]) -> Tensor:
    """A stream's rows [T, ...] by document, [B, longest, ...], filled up with zeros."""
    return pad_sequence(list(rows_TE.split(lengths)), batch_first=True)


def by_document(lengths: list[int], *streams_1TE: Tensor | None) -> Iterator[tuple]:
    """Of each document its part [1, tokens, ...] of every stream [1, T, ...]; None stays None."""
    return zip(*(repeat(None) if x is None else x.split(lengths, 1) for x in streams_1TE))  # noqa: B905


def end_states(
    segment_map: Callable, lengths: list[int], writes: Iterable[Tensor | None], last: Tensor
) -> Tensor:
    """[N, ...], the state after each document of a stream.

    Args:
        segment_map: what tokens do to the state before them, a pair of transition and write.
        writes: what the tokens write, [1, T, ...] each.
        last: the state after the last document, which the op gives.
    """
    earlier = list(by_document(lengths, *writes))[:-1]
    return torch.cat([*(segment_map(*part)[1] for part in earlier), last])


def _pad_and_cat(tensors: list[Tensor]) -> Tensor:
    longest = max(t.shape[1] for t in tensors)
    return torch.cat(
        [F.pad(t, (0, 0) * (t.dim() - 2) + (0, longest - t.shape[1])) for t in tensors]
    )
