"""DeepSpeed's ZeRO around the same model: the second engine.

Interface of `optimizer.py` (`wrap_model`, `build_optimizer`, `clip_and_step`) and of
`optimizer_state.py`, so that loop, checkpoints and tools do not know which engine runs.
"""

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from mixtron.megatron_ext.config import DeepSpeedConfig, OptimizerConfig
from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.optimizer import clip_and_step
from mixtron.megatron_ext.optimizer_state import (
    Fragment,
    adam_states,
    allocate_moments,
    optimizer_shards,
    places,
    rectangles,
    state_tensors,
    weight_shards,
)
from mixtron.megatron_ext.parallel import Ranks


class ZeroModel(torch.nn.Module):
    """One model chunk under ZeRO, where Megatron's engine has its DistributedDataParallel."""

    def __init__(self, module: Any, optimizer: "ZeroOptimizer"):
        super().__init__()
        self.module = module
        self.config = module.config
        self._held = optimizer

    def shards(self, ranks: Ranks) -> dict:
        """Where each parameter, or what this rank holds of it, lies in the whole model."""
        if self._held.weights_whole:
            return weight_shards(self.module, ranks)
        return self._held.weight_rectangles()

    @property
    def whole(self) -> bool:
        """Whether each data rank holds all weights."""
        return self._held.weights_whole

    def forward(self, *args, **kwargs):
        return self._held.engine(*args, **kwargs)

    def gather_persistent(self) -> None:
        """Stage 3, after new weights were put into the parts: small parameters stay whole."""
        zero = self._held.engine.optimizer
        zero._partition_all_parameters()  # those that are whole now would not be gathered
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def zero_grad_buffer(self) -> None:
        """Nothing: ZeRO's step clears its gradients."""

    def run_micro_batches(self, forward_step: Callable, micro_batches: list, ranks: Ranks) -> list:
        """Forward and backward of each; the reports of `forward_step`'s loss function.

        The gradient is that of the mean loss a token over all ranks, as Megatron's engine has it.
        """
        counts = torch.stack([micro.mask_BT.sum() for micro in micro_batches]).sum()
        dist.all_reduce(counts, group=ranks.groups.dp)
        # ZeRO takes the mean over data ranks.
        scale = ranks.data_size / max(float(counts), 1.0)
        engine, reports, iterator = self._held.engine, [], iter(micro_batches)
        for i in range(len(micro_batches)):
            engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            output, loss_function = forward_step(iterator, self)
            loss, _, report = loss_function(output)
            engine.backward(loss * scale, scale_wrt_gas=False)
            reports.append(report)
        return reports


class ZeroOptimizer:
    """AdamW on ZeRO's shares of the parameters."""

    def __init__(self, engine: Any, stage: int, places: dict):
        self.engine, self.places = engine, places
        self._zero, self._stage = engine.optimizer, stage
        self._discard = False
        self._refuse_bad_norms()
        self._stage_gradients_in_fp32()

    @property
    def weights_whole(self) -> bool:
        return self._stage < 3

    @property
    def adam(self) -> torch.optim.AdamW:
        return self._zero.optimizer

    @property
    def param_groups(self) -> list[dict]:
        return self.adam.param_groups

    def zero_grad(self) -> None:
        """Nothing: ZeRO's step clears its gradients."""

    def step(self, clip_grad_norm: float, *, discard: bool) -> tuple[float, bool]:
        self._zero.clip_grad, self._discard = clip_grad_norm, discard
        self.engine.step()
        applied = not self._zero.overflow
        if not applied and self._stage < 3:
            # With an offloaded optimizer DeepSpeed would add the next gradients to these.
            self._zero.averaged_gradients.clear()
        return float(self._zero._global_grad_norm) if applied else math.nan, applied

    def reload_model_params(self) -> None:
        """Takes the weights as they are now for the fp32 ones."""
        self._zero.refresh_fp32_params()

    def masters(self) -> list[Tensor]:
        """The flat fp32 parameters of this rank, which AdamW updates."""
        if self._stage < 3:
            return self._zero.single_partition_of_fp32_groups
        return self._zero.fp32_partitioned_groups_flat

    def fragments(self) -> Iterator[Fragment]:
        """What this rank owns of each parameter, in fp32, with its moments."""
        allocate_moments(self.adam, self.masters())
        owned = _owned_flat if self._stage < 3 else _owned_partitions
        for parameter, start, master, position, count in owned(self._zero):
            tensors = state_tensors(master, self.adam)
            mine = {k: flat.detach()[position : position + count] for k, flat in tensors.items()}
            yield Fragment(parameter, start, mine)

    def weight_rectangles(self) -> dict:
        """Stage 3: this rank's part of the weights, by name and number."""
        by_name = {}
        for parameter, start, _, _, count in _owned_partitions(self._zero):
            held: Any = parameter
            part = Fragment(parameter, start, {"": held.ds_tensor[:count]})
            by_name[held.ds_id] = dict(enumerate(rectangles([part], self.places)))
        return by_name

    def _refuse_bad_norms(self) -> None:
        """Makes ZeRO pass over a step whose norm is not finite, or that the caller discards.

        DeepSpeed checks it for fp16 and, at stages 1 and 2, not for bf16.
        """
        zero: Any = self._zero
        name = "scaled_global_norm" if self._stage < 3 else "_get_norm_groups"
        measure = getattr(zero, name)
        norm = torch.tensor(math.inf)
        refusal = norm if self._stage < 3 else [norm]
        setattr(zero, name, lambda: refusal if self._discard else measure())
        zero.check_grad_overflow = True
        zero.check_overflow = lambda partition_gradients=True: None

    def _stage_gradients_in_fp32(self) -> None:
        """Stage 2 would round them to the model's dtype, those of fp32 parameters too."""
        self._zero._gradient_reduction_buffer_dtype = lambda: torch.float32


@clip_and_step.register
def _(
    optimizer: ZeroOptimizer, clip_grad_norm: float, loss: Tensor | None = None
) -> tuple[float, bool]:
    return optimizer.step(clip_grad_norm, discard=loss is not None and not loss.isfinite())


@optimizer_shards.register
def _(optimizer: ZeroOptimizer, model_shards: dict) -> list[ShardedTensor]:
    return list(rectangles(optimizer.fragments(), optimizer.places))


@adam_states.register
def _(optimizer: ZeroOptimizer) -> Iterator[dict]:
    return iter(optimizer.adam.state.values())


Owned = Iterator[tuple[torch.nn.Parameter, int, Tensor, int, int]]
"""A parameter, the first of its elements that this rank owns; the flat tensor that holds them and
the first's position in it; how many."""


def _owned_flat(zero: Any) -> Owned:
    """Stages 1 and 2: a group's parameters are one flat tensor, cut into equal parts."""
    for i, group in enumerate(zero.round_robin_bit16_groups):
        size = int(zero.partition_size[i])
        low = size * dist.get_rank(zero.real_dp_process_group[i])
        for parameter, offset in zip(group, zero.round_robin_bit16_offsets[i], strict=True):
            start = max(low, offset)
            count = min(low + size, offset + parameter.numel()) - start
            if count > 0:
                flat = zero.single_partition_of_fp32_groups[i]
                yield parameter, start - offset, flat, start - low, count


def _owned_partitions(zero: Any) -> Owned:
    """Stage 3: each parameter is cut into equal parts; a group's parts on a rank are one tensor."""
    for i, group in enumerate(zero.fp16_groups):
        rank, position = dist.get_rank(zero.sub_group_process_groups[i]), 0
        for parameter in group:
            size = parameter.partition_numel()
            start = rank * size
            count = min(size, parameter.ds_numel - start)
            if count > 0:
                yield parameter, start, zero.fp32_partitioned_groups_flat[i], position, count
            position += size


def build_deepspeed(
    chunks: list,
    optimizer: OptimizerConfig,
    zero: DeepSpeedConfig,
    ranks: Ranks,
    *,
    micro_batches: int,
    overlap: bool,
) -> tuple[list[ZeroModel], ZeroOptimizer]:
    """Puts a model under ZeRO, with an AdamW that decays what Megatron's engine decays.

    Args:
        chunks: one; there is no pipeline here.
        micro_batches: a rank's in a step.
        overlap: gradient reduction with backward, on a GPU.
    Raises:
        ConfigError: weights of two dtypes are to be offloaded.
    """
    _refuse_mixed_offload(chunks, zero)
    deepspeed = _import_deepspeed(ranks.device)
    overlap = overlap and ranks.device.type == "cuda"
    [chunk] = chunks
    layout = places(weight_shards(chunk, ranks))
    _sum_partial_gradients(chunk, ranks)
    adam = torch.optim.AdamW(
        _parameter_groups(chunk, optimizer.weight_decay),
        lr=optimizer.lr,
        betas=(optimizer.betas[0], optimizer.betas[1]),
        eps=optimizer.eps,
        fused=True,
    )
    engine = deepspeed.initialize(
        model=chunk,
        optimizer=adam,
        config=_library_config(zero, optimizer, micro_batches, overlap),
        mpu=_ModelParallelUnit(ranks),
        dist_init_required=False,
    )[0]
    held = ZeroOptimizer(engine, zero.zero_stage, layout)
    return [ZeroModel(chunk, held)], held


class _OneDtypeEach:
    """What `defragment` makes of tensors, one flat buffer a dtype, addressed as one."""

    def __init__(self, tensors: list[Tensor]):
        from deepspeed.runtime.zero.utils import defragment

        by_dtype = itertools.groupby(tensors, lambda tensor: tensor.dtype)
        self._buffers = [defragment(list(same)) for _, same in by_dtype]

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        for buffer in self._buffers:
            if start < buffer.numel():
                return buffer.narrow(dim, start, length)
            start -= buffer.numel()
        raise IndexError(f"{start} elements beyond the end")


def _import_deepspeed(device: torch.device) -> Any:
    """Its import takes seconds, so that runs of the other engine do without."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")  # a world of one was started by nobody
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    import deepspeed.runtime.zero.stage3

    # Stage 3 wants parameters of one dtype, for no other reason than this function.
    deepspeed.runtime.zero.stage3.defragment = _OneDtypeEach
    # It would compile this one at its first use on CPUs, where gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _refuse_mixed_offload(chunks: list, zero: DeepSpeedConfig) -> None:
    """DeepSpeed's buffer in host memory has the dtype of the first parameters for all of them."""
    by_dtype = {p.dtype: name for chunk in chunks for name, p in chunk.named_parameters()}
    if zero.offload == "optimizer+weights" and len(by_dtype) > 1:
        raise ConfigError(
            f"deepspeed.offload=optimizer+weights would round {by_dtype[torch.float32]} and other "
            "fp32 parameters to bf16; use offload=optimizer, or training.precision=fp32"
        )


def _parameter_groups(chunk: Any, weight_decay: float) -> list[dict]:
    """Matrices are decayed; norms, biases, decays and gates are not. A group has one dtype."""
    groups: dict[tuple, dict] = {}
    for name, parameter in chunk.named_parameters():
        decayed = parameter.dim() > 1 and not name.endswith(".bias")
        key = (str(parameter.dtype), decayed)
        multiplier = 1.0 if decayed else 0.0
        group = {"params": [], "wd_mult": multiplier, "weight_decay": multiplier * weight_decay}
        groups.setdefault(key, group)["params"].append(parameter)
    # ZeRO takes the first group's dtype for the model's.
    return [groups[key] for key in sorted(groups)]


def _sum_partial_gradients(chunk: Any, ranks: Ranks) -> None:
    """Norms under sequence parallelism: each tensor rank sees its share of the tokens.

    Megatron's engine sums their gradients after the last micro-batch. ZeRO has partitioned them by
    then, so here it is done in backward, as `replicated` does it for mixers' parameters.
    """
    group = ranks.groups.tp

    def total(gradient: Tensor) -> Tensor:
        summed = gradient.float()
        dist.all_reduce(summed, group=group)
        return summed.to(gradient.dtype)

    for parameter in chunk.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(total)


def _library_config(
    zero: DeepSpeedConfig, optimizer: OptimizerConfig, micro_batches: int, overlap: bool
) -> dict:
    """DeepSpeed's own config. Precision is the model's: its bf16 mode would round fp32 decays."""
    on_host = {"device": "cpu", "pin_memory": zero.pin_memory}
    offload = {}
    if zero.offload != "none":
        offload["offload_optimizer"] = on_host
    if zero.offload == "optimizer+weights":
        offload["offload_param"] = on_host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": optimizer.clip_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": zero.zero_stage,
            "overlap_comm": overlap,
            **offload,
            **zero.zero_optimization.model_dump(exclude_none=True),
        },
    }


class _ModelParallelUnit:
    """The names under which DeepSpeed asks for ranks and groups."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def get_data_parallel_rank(self) -> int:
        return self._ranks.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self._ranks.data_size

    def get_data_parallel_group(self):
        return self._ranks.groups.dp

    def get_tensor_model_parallel_rank(self) -> int:
        return self._ranks.tensor_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._ranks.tensor_size

    def get_tensor_model_parallel_group(self):
        return self._ranks.groups.tp

    # With one pipeline stage a model's ranks are its tensor ranks.
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_group = get_tensor_model_parallel_group
