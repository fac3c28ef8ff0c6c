"""Gradient buffers and AdamW on Megatron's distributed optimizer.

`deepspeed_engine.py` has the same on ZeRO; functions of an optimizer choose by its class.
"""

import functools
import math
from typing import Any

import torch
from megatron.core import optimizer as library
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from mixtron.megatron_ext.config import OptimizerConfig, ParallelConfig
from mixtron.megatron_ext.parallel import Ranks


def wrap_model(
    chunks: list, parallel: ParallelConfig, ranks: Ranks
) -> list[DistributedDataParallel]:
    """Puts each chunk's gradients into contiguous fp32 buffers that are reduced over data ranks."""
    overlap = parallel.overlap and ranks.device.type == "cuda"
    wrapped = []
    for i, chunk in enumerate(chunks):
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
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
    return get_megatron_optimizer(config, wrapped, use_gloo_process_groups=True)


@functools.singledispatch
def clip_and_step(optimizer: MegatronOptimizer, clip_grad_norm: float) -> tuple[float, bool]:
    """Clips to the global norm and applies AdamW, unless the norm is not finite.

    Returns:
        The gradient norm before clipping, equal on every rank, and whether the step was applied.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm, False
    if clip_grad_norm > 0:
        for part in optimizer.chained_optimizers:  # type: ignore[attr-defined]
            parameters = part.get_parameters()
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, clip_grad_norm, norm)
    optimizer.step_with_ready_grads()
    return norm, True


@functools.singledispatch
def discard_gradients(optimizer: MegatronOptimizer) -> None:
    """After a backward that no step follows: nothing, the buffers are zeroed before the next."""


def set_learning_rate(optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> None:
    """Sets what the config says now, whatever a checkpoint's parameter groups carried."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]
