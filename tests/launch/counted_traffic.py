"""One optimizer step on CPU ranks, with the bytes counted that its collectives send."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mixtron.launch.config import load_config
from mixtron.launch.data import Sample
from mixtron.launch.micro_batch import collate, run_micro_batches
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.optimizer import build_optimizer, clip_and_step, wrap_model
from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel
from tests.multi_gpu.communication import kind_of_group, ring_bytes


class SentBytes(TorchDispatchMode):
    """Sums what a ring would send, by kind; a collective's first argument is its output, also where
    it is its input as well."""

    def __init__(self):
        super().__init__()
        self.by_kind: dict[str, float] = {}

    @property
    def total(self) -> float:
        return sum(self.by_kind.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("c10d.")
        if name != str(function):
            [group] = [a for a in args if isinstance(a, torch.ScriptObject)][:1]
            group = dist.ProcessGroup.unbox(group)
            kind = kind_of_group(group.group_desc)
            sent = self._sent(name, args, group.size())
            self.by_kind[kind] = self.by_kind.get(kind, 0.0) + sent
        return function(*args, **(kwargs or {}))

    def _sent(self, name: str, args: tuple, ranks: int) -> float:
        size = _nbytes(args[1] if "reduce_scatter" in name else args[0])
        return ring_bytes(name, size, size, ranks)


def _nbytes(tensors) -> int:
    return sum(x.nbytes for x in tree_leaves(tensors) if isinstance(x, torch.Tensor))


def sent_in_a_step(path: Path, overrides: list[str]) -> float:
    """Of this rank, in fp32."""
    config = load_config(path, overrides)
    parallel, training = config.parallel, config.training
    length, per_micro = config.data.sequence_length, training.micro_batch_sequences
    ranks = init_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline,
        parallel.context,
        seed=1,
        device=init_distributed(),
    )
    chunks = build_model(
        config.model,
        config.mixers,
        parallel,
        ranks,
        seed=1,
        bf16=False,
        recompute=training.recompute == "full",
        max_tokens=per_micro * length,
    )
    wrapped = wrap_model(chunks, parallel, ranks)
    optimizer = build_optimizer(wrapped, config.optimizer, ranks, bf16=False)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    zeros = np.zeros(length + 1, dtype=np.int64)
    sample = Sample(zeros, np.array([0]), np.ones(length, dtype=bool))
    count = config.global_batch_sequences // (ranks.data_size * per_micro)
    micro_batches = [collate([sample] * per_micro, 1, ranks) for _ in range(count)]
    with SentBytes() as sent:
        run_micro_batches(wrapped, config, ranks, micro_batches, train=True)
        clip_and_step(optimizer, 1.0)
    return sent.total
