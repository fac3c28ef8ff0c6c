"""A tensor's parts, whose gradients their ops write side by side."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Place = Callable[[], Tensor]
"""Gives the memory that a part's gradient belongs in, in backward."""


def split(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """`x.split(widths, dim=-1)`.

    torch joins the gradients of parts by copying them. Here an op may ask `place_of` its argument
    where to write; only what lies elsewhere is copied, and all of it if no op asks.
    """
    gradient = _Gradient(x.shape, x.dtype, x.device, list(widths))
    parts: Any = _Split.apply(x, gradient)
    for number, part in enumerate(parts):
        # It holds no tensor: a part that held itself would outlive its last use.
        part.place = partial(gradient.part, number)
    return parts


def place_of(x: Tensor) -> Place | None:
    """Of a part that `split` gave, and not of views of it."""
    return getattr(x, "place", None)


def viewed(part: Tensor, view: Callable[[Tensor], Tensor]) -> tuple[Tensor, Place | None]:
    """A view of a part, and where the view's gradient belongs."""
    place = place_of(part)
    return view(part), None if place is None else lambda: view(place())


class _Gradient:
    """Of the whole tensor; there is one from the first op's asking to the end of backward."""

    def __init__(self, shape: torch.Size, dtype, device, widths: list[int]) -> None:
        self.shape, self.dtype, self.device, self.widths = shape, dtype, device, widths
        self.whole: Tensor | None = None

    def part(self, number: int) -> Tensor:
        if self.whole is None:
            self.whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.whole.split(self.widths, dim=-1)[number]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gradient):
        ctx.gradient = gradient
        return x.split(gradient.widths, dim=-1)

    @staticmethod
    def backward(ctx, *found):  # type: ignore[override]
        whole, ctx.gradient.whole = ctx.gradient.whole, None
        if whole is None:
            return torch.cat(found, dim=-1), None
        for part, gradient in zip(whole.split(ctx.gradient.widths, dim=-1), found, strict=True):
            if not _is_there(part, gradient):
                part.copy_(gradient)
        return whole, None


def _is_there(part: Tensor, gradient: Tensor) -> bool:
    """Whether the one is the other's memory. Where there is one element, strides say nothing."""
    strides = zip(part.shape, part.stride(), gradient.stride(), strict=True)
    same = all(own == other for size, own, other in strides if size > 1)
    return same and part.data_ptr() == gradient.data_ptr()
