"""Selective recomputation: what is cheap to compute is not kept for backward but computed again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Part = Literal["norm", "conv", "gate", "mlp_act"]


@contextmanager
def computed_again(
    compute: Callable[[], tuple[Tensor, ...]], outputs: tuple[Tensor, ...]
) -> Iterator[None]:
    """Operations inside keep nothing of `outputs` and their views: backward computes them again.

    Once, for all that keep it; it is gone when the last of them has read it. Backward runs once.

    Args:
        compute: gives `outputs` anew, in memory of the same layout. What it reads is kept.
    """
    # Numbers, not the storages: what the graph holds must not keep them alive.
    storages = {x.untyped_storage()._cdata: number for number, x in enumerate(outputs)}
    waiting: list[None] = []
    made: list[tuple[Tensor, ...]] = []

    def pack(x: Tensor):
        number = storages.get(x.untyped_storage()._cdata)
        if number is None:
            return x
        waiting.append(None)
        return number, (x.shape, x.stride(), x.storage_offset())

    def unpack(packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not made:
            with torch.no_grad():
                made.append(compute())
        number, layout = packed
        found = made[0][number].as_strided(*layout)
        waiting.pop()
        if not waiting:
            made.clear()
        return found

    with saved_tensors_hooks(pack, unpack):
        yield
