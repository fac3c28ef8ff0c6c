"""Gradient buffers and AdamW on Megatron's distributed optimizer.

`deepspeed_engine.py` has the same on ZeRO; functions of an optimizer choose by its class.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as library
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor

from mixtron.megatron_ext.config import OptimizerConfig, ParallelConfig
from mixtron.megatron_ext.host_copy import HostCopy
from mixtron.megatron_ext.parallel import Ranks
from mixtron.megatron_ext.weight_gradients import add_in_products


def wrap_model(
    chunks: list, parallel: ParallelConfig, ranks: Ranks
) -> list[DistributedDataParallel]:
    """Puts each chunk's gradients into contiguous fp32 buffers that are reduced over data ranks."""
    # A rank alone has nothing to send, and calls that send nothing keep the GPU waiting.
    several = ranks.groups.dp_cp.size() > 1
    overlap = parallel.overlap and ranks.device.type == "cuda" and several
    wrapped = []
    for i, chunk in enumerate(chunks):
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            bucket_size=parallel.bucket_parameters,
        )
        wrapped.append(
            DistributedDataParallel(
                chunk.config,
                config,
                chunk,
                # Later chunks' gradients are ready last: there is nothing to overlap them with.
                disable_bucketing=i > 0,
                pg_collection=ranks.groups,
            )
        )
        wrapped[-1].broadcast_params()
        if parallel.tensor == 1 or not chunk.config.recomputed:
            add_in_products(chunk)
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        single = len(wrapped) == 1
        config.no_sync_func = wrapped[0].no_sync if single else [w.no_sync for w in wrapped]
        if not single:
            config.grad_sync_func = [w.start_grad_sync for w in wrapped]
            config.param_sync_func = [w.start_param_sync for w in wrapped]
    return wrapped


def build_optimizer(
    wrapped: list[Any], optimizer: OptimizerConfig, ranks: Ranks, *, bf16: bool
) -> MegatronOptimizer:
    """AdamW with fp32 main parameters, sharded over data-parallel ranks.

    One-dimensional parameters (norms, biases, decays, gates) are not decayed.
    """
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=0.0,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad_norm,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        overlap_param_gather=wrapped[0].ddp_config.overlap_param_gather,
    )
    # Else another library's Adam is taken where one is installed, and its state differs.
    library.USING_PYTORCH_OPTIMIZER = True
    built = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=True)
    for group in built.param_groups:
        group["fused"] = True  # one kernel for all parameters, which also clips
    return built


@functools.singledispatch
def clip_and_step(
    optimizer: MegatronOptimizer, clip_grad_norm: float, loss: Tensor | None = None
) -> tuple[float, bool]:
    """Clips to the global norm and applies AdamW, unless the norm or the loss is not finite.

    Everything is launched before the host waits for the norm, and for that alone: the kernel that
    updates the parameters reads from the device what to divide by, and whether to do anything.
    While it does the host begins the next step.

    Args:
        loss: 0-dimensional, on the device, equal on every rank.
    Returns:
        The gradient norm before clipping, equal on every rank, and whether the step was applied.
    """
    optimizer.prepare_grads()
    norm = gradient_norm(optimizer)
    finite = norm.isfinite() if loss is None else norm.isfinite() & loss.isfinite()
    divisor = ((norm + 1e-6) / clip_grad_norm).clamp_min(1) if clip_grad_norm > 0 else None
    for part in optimizer.chained_optimizers:  # type: ignore[attr-defined]
        if not part.is_stub_optimizer:
            part.optimizer.grad_scale = divisor
            part.optimizer.found_inf = 1 - finite.float()
    found = HostCopy(torch.stack([norm, finite.float()]))
    optimizer.step_with_ready_grads()
    value, applied = found.tolist()
    return value, bool(applied)


def gradient_norm(optimizer: MegatronOptimizer) -> Tensor:
    """The norm of all ranks' gradients, counted once each, on the device; 0-dimensional fp32."""
    parts = optimizer.chained_optimizers  # type: ignore[attr-defined]
    gradients = [gradient for part in parts for gradient in part.get_grads_for_grad_norm()]
    squares = torch.zeros((), device=torch.cuda.current_device())
    if gradients:
        norms = torch._foreach_norm(gradients)  # type: ignore[attr-defined]
        squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())  # type: ignore
    return squares.sqrt()


def set_learning_rate(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Sets what the config says now, whatever a checkpoint's parameter groups carried."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]
