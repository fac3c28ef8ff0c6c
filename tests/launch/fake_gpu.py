"""What a forward keeps on a GPU, without one: `python -m tests.launch.fake_gpu CONFIG...`.

The model runs on tensors that have shapes, dtypes and the device `cuda`, but no storage: torch
chooses the kernels and autograd formulas that it would choose on a GPU; Triton's are not launched.
Prints JSON, a line for each config: bytes that are alive after the forward, weights and inputs left
out, and the most that were in between. It patches what it needs, so it is a process of its own.
Backward needs a driver.
"""

import dataclasses
import gc
import json
import sys
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from mixtron.kernels.launching import Launched
from mixtron.kernels.linear_cross_entropy import op
from mixtron.launch.config import RunConfig, load_config
from mixtron.megatron_ext import cpu_backend, model
from mixtron.megatron_ext.batch import make_batch
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel

GPU = torch.device("cuda:0")


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.known = weakref.WeakSet()
        self.now = self.peak = 0

    def ignore(self, tensors) -> None:
        self.known.update(x.untyped_storage() for x in tensors)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def measure(config: RunConfig, ranks: Ranks) -> dict[str, int]:
    sequences, length = config.training.micro_batch_sequences, config.data.sequence_length
    batch = make_batch([length] * sequences, step=1, device="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        [chunk] = model.build_model(
            config.model,
            config.mixers,
            config.parallel,
            ranks,
            seed=1,
            bf16=config.training.precision == "bf16",
            recompute=config.training.recompute == "full",
            recomputed=config.training.recomputed,
            max_tokens=sequences * length,
        )
        batch = dataclasses.replace(
            batch,
            cu_seqlens=torch.empty_like(batch.cu_seqlens, device=GPU),
            position_ids=torch.empty_like(batch.position_ids, device=GPU),
        )
        tokens_BT = torch.empty(1, sequences * length, dtype=torch.int64, device=GPU)
        mask_BT = torch.empty_like(tokens_BT, dtype=torch.bool)
        allocations = Allocations()
        allocations.ignore(
            [*chunk.parameters(), tokens_BT, mask_BT, batch.cu_seqlens, batch.position_ids]
        )
        with allocations:
            scored = tokens_BT, mask_BT
            loss = model.forward(chunk, config.model, ranks, tokens_BT, batch, *scored)
            gc.collect()
            measured = {"kept": allocations.now, "peak": allocations.peak}
        del loss
    return measured


def gpu_options(*args, **kwargs):
    """Megatron's options as they are where a GPU exists."""
    config = OPTIONS(*args, **kwargs)
    config.use_cpu_initialization = False
    return config


def not_launched(*args, **kwargs) -> None:
    """Instead of a kernel. A mock would keep the tensors that it was called with."""


OPTIONS = model.transformer_config
H200 = SimpleNamespace(shared_memory_per_block_optin=227 * 2**10, multi_processor_count=132)

if __name__ == "__main__":
    ranks = init_model_parallel(seed=1, device=init_distributed())
    ranks = dataclasses.replace(ranks, device=GPU)
    for name in cpu_backend._FACTORIES:
        setattr(torch, name, getattr(torch, name).__wrapped__)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=GPU),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=H200),
        mock.patch.object(dist, "all_reduce"),
        mock.patch.object(JITFunction, "run", not_launched),
        mock.patch.object(Launched, "__call__", not_launched),
        mock.patch.object(op, "add_product", not_launched),  # it has no form without storage
        mock.patch.object(torch.nn.Module, "to", lambda module, *args, **kwargs: module),
        mock.patch.object(model, "initialise"),
        mock.patch.object(model, "transformer_config", gpu_options),
    ):
        for path in sys.argv[1:]:
            print(json.dumps(measure(load_config(path), ranks)), flush=True)
