"""Process groups, device and random state of one rank."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from mixtron.megatron_ext import cpu_backend

cpu_backend.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402


@dataclass(frozen=True)
class Ranks:
    """Where this process stands, and how many there are, in each dimension."""

    world_rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    context_rank: int
    context_size: int
    data_rank: int
    data_size: int
    device: torch.device
    groups: ProcessGroupCollection

    @property
    def is_first(self) -> bool:
        return self.world_rank == 0


def init_distributed(timeout_s: float = 600.0) -> torch.device:
    """Joins the world described by torchrun's variables (or a world of one); returns the device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(
                backend, store=HashStore(), rank=0, world_size=1, timeout=timeout
            )
    return device


def init_model_parallel(
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int = 1,
    context: int = 1,
    *,
    seed: int,
    device: torch.device,
) -> Ranks:
    """Builds Megatron's process groups and seeds the random states.

    Dropout differs between pipeline stages and between data- and context-parallel ranks; inside a
    tensor-parallel group Megatron's tracker keeps what must agree equal.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline if virtual_pipeline > 1 else None,
        context_parallel_size=context,
    )
    ps = parallel_state
    data_context_rank = ps.get_data_parallel_rank(with_context_parallel=True)
    model_parallel_cuda_manual_seed(
        seed + 100 * ps.get_pipeline_model_parallel_rank() + 100_003 * data_context_rank,
        force_reset_rng=True,
    )
    return Ranks(
        world_rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=ps.get_tensor_model_parallel_rank(),
        tensor_size=ps.get_tensor_model_parallel_world_size(),
        pipeline_rank=ps.get_pipeline_model_parallel_rank(),
        pipeline_size=ps.get_pipeline_model_parallel_world_size(),
        context_rank=ps.get_context_parallel_rank(),
        context_size=ps.get_context_parallel_world_size(),
        data_rank=ps.get_data_parallel_rank(),
        data_size=ps.get_data_parallel_world_size(),
        device=device,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
    )
