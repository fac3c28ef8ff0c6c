"""Numbers that the device computes and the host decides by."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor as it is now, on its way to the host. The host waits for it when it reads it, and
    for nothing that is launched after this."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.detach().to("cpu", non_blocking=True, copy=True)  # pinned
        self._there = torch.cuda.Event() if x.is_cuda else None
        if self._there is not None:
            self._there.record()

    def tolist(self) -> list:
        if self._there is not None:
            self._there.synchronize()
        return self._copy.tolist()
