"""Selective recomputation: what is cheap to compute is not kept for backward but computed again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Part = Literal["norm", "conv", "mlp_act"]


@contextmanager
def computed_again(compute: Callable[[], Tensor], output: Tensor) -> Iterator[None]:
    """Operations inside keep nothing of `output`, nor of its views: backward computes it again.

    Once, for all that keep it; it is gone when the last of them has read it. Backward runs once.

    Args:
        compute: gives `output` anew, in memory of the same layout. What it reads is kept.
    """
    # A number, not the storage: what the graph holds must not keep it alive.
    storage = output.untyped_storage()._cdata
    waiting: list[None] = []
    made: list[Tensor] = []

    def pack(x: Tensor):
        if x.untyped_storage()._cdata != storage:
            return x
        waiting.append(None)
        return x.shape, x.stride(), x.storage_offset()

    def unpack(packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not made:
            with torch.no_grad():
                made.append(compute())
        found = made[0].as_strided(*packed)
        waiting.pop()
        if not waiting:
            made.clear()
        return found

    with saved_tensors_hooks(pack, unpack):
        yield
