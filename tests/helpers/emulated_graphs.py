"""CUDA graphs on a CPU: what was recorded runs again on the same memory and arguments."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class EmulatedGraph:
    """As `torch.cuda.CUDAGraph`: a recording changes nothing that was there before."""

    def capture_begin(self, **_) -> None:
        self.recorder = _Recorder()
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)
        for tensor, before in self.recorder.changed.values():
            tensor.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, outputs in self.recorder.calls:
            leaves: list[Any] = tree_leaves(function(*args, **kwargs))
            for recorded, found in zip(outputs, leaves, strict=True):
                if hasattr(found, "wait"):
                    found.wait()  # what ranks send each other
                elif isinstance(found, Tensor) and _memory(found) != _memory(recorded):
                    recorded.copy_(found)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, list]] = []
        self.made: set[int] = set()
        self.changed: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        by_name = zip(func._schema.arguments, args, strict=False)
        written = [x for argument, x in by_name if argument.is_write] + [kwargs.get("out")]
        for x in written:
            if isinstance(x, Tensor) and _memory(x) not in self.made | self.changed.keys():
                self.changed[_memory(x)] = x.detach(), x.detach().clone()
        outputs = func(*args, **kwargs)
        leaves = tree_leaves(outputs)
        self.calls.append((func, args, kwargs, leaves))
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.made |= {_memory(x) for x in leaves if isinstance(x, Tensor)} - given
        return outputs


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def install(patch) -> None:
    """In torch.cuda, where Megatron's calls are emulated already; `patch` is a MonkeyPatch."""
    patch.setattr(torch.cuda, "CUDAGraph", EmulatedGraph)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    wait = dist.Work.wait

    def waited(work: dist.Work, *options) -> bool:
        with _disable_current_modes():  # gloo may copy what came in, which is part of its call
            return wait(work, *options)

    patch.setattr(dist.Work, "wait", waited)
