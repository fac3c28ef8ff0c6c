"""The distributed optimizer's state as shards of whole tensors, for checkpoints of any layout.

A data-parallel rank owns a contiguous range of each parameter's elements. Megatron's
`fully_reshardable` checkpoint format gathers these ranges into whole tensors in every rank's
memory, when saving and when loading. A contiguous range of a row-major tensor is also the union of
a few rectangular blocks, and a checkpoint can hold blocks: so each rank stores its own range and
reads its own range, in place, without communication. Keys and shapes are those of
`fully_reshardable`.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

STATES = ("param", "exp_avg", "exp_avg_sq")
"""The fp32 main parameter and Adam's two moments."""
PREFIX = "optimizer.state."


def optimizer_shards(optimizer: MegatronOptimizer, model_shards: dict) -> list[ShardedTensor]:
    """This rank's part of the optimizer's state; the tensors are views of the optimizer's own.

    Moments that do not exist yet (no step was taken) are made, as zeros.

    Args:
        model_shards: the model's sharded state dict, whose data are the parameters themselves.
    """
    by_parameter = {shard.data: shard for shard in nested_values(model_shards)}
    shards = []
    for part in _parts(optimizer):
        _allocate(part)
        for parameter, main in _owned(part):
            held = part._get_model_param_range_map(parameter)["param"]
            tensors = {"param": main, **part.optimizer.state[main]}
            for piece in stored_tensors(by_parameter[parameter]):
                shards += _piece_shards(parameter, piece, held.start, held.end, tensors)
    return shards


def stored_tensors(shard: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """What a parameter becomes in a checkpoint: itself, or its fused components."""
    if isinstance(shard, ShardedTensorFactory):
        return list(nested_values(shard.build()))
    return [shard]


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """Steps that Adam has taken, 0 where this rank owns no element of any parameter."""
    steps = {
        int(state["step"]) for part in _parts(optimizer) for state in part.optimizer.state.values()
    }
    if len(steps) > 1:
        raise ValueError(f"parameters differ in their Adam step: {sorted(steps)}")
    return steps.pop() if steps else 0


def set_optimizer_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Each parameter gets a counter of its own: a shared one would be counted up once for each."""
    for part in _parts(optimizer):
        for parameter, state in part.optimizer.state.items():
            state["step"] = torch.tensor(float(step), device=parameter.device)


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            raise TypeError(
                f"optimizer {type(part.optimizer).__module__}.{type(part.optimizer).__name__}: "
                "only the state of torch.optim.AdamW can be stored"
            )
    return parts


def _owned(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Parameters that this rank owns elements of, each with those elements in fp32.

    Megatron's own map from a parameter to its place in the optimizer counts bf16 and fp32
    parameters in one order and keeps them in another: it mixes up their states.
    """
    for groups, main_groups in (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for parameters, mains in zip(groups, main_groups, strict=True):
            yield from zip(parameters, mains, strict=True)


def _allocate(part: DistributedOptimizer) -> None:
    """What AdamW makes at its first step."""
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            state = part.optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter.detach())
                state["exp_avg_sq"] = torch.zeros_like(parameter.detach())


def _piece_shards(
    parameter: torch.Tensor,
    piece: ShardedTensor,
    start: int,
    end: int,
    tensors: dict[str, torch.Tensor],
) -> Iterator[ShardedTensor]:
    """The shards of one stored tensor within this rank's elements [start, end) of the parameter."""
    assert piece.data is not None
    if not piece.data.is_contiguous() or piece.prepend_axis_num:
        raise ValueError(f"{piece.key}: optimizer state needs contiguous parts of the parameter")
    first = int(piece.data.storage_offset() - parameter.storage_offset())
    low, high = max(start, first), min(end, first + piece.data.numel())
    position = low - start
    for offset, shape in blocks(tuple(piece.data.shape), low - first, high - first):
        count = math.prod(shape)
        for name in STATES:
            data = tensors[name].detach()[position : position + count].view(shape)
            yield dataclasses.replace(
                piece,
                key=f"{PREFIX}{name}.{piece.key}",
                data=data,
                dtype=data.dtype,
                local_shape=shape,
                global_offset=tuple(map(sum, zip(piece.global_offset, offset, strict=True))),
                axis_fragmentations=None,
                # Data-parallel ranks hold different elements: none is a replica of another.
                replica_id=(*piece.replica_id[:-1], 0),  # type: ignore[index]
                allow_shape_mismatch=False,
            )
        position += count


Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a rectangle."""


def blocks(shape: tuple[int, ...], start: int, end: int) -> Iterator[Block]:
    """Cuts elements [start, end) of a row-major tensor into rectangles, in order.

    The end of a row that is begun, whole rows, the beginning of a row: three for a matrix.
    """
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = math.prod(shape[1:])
    whole_start = min(-(-start // row) * row, end)
    whole_end = max(end // row * row, whole_start)
    yield from _within_row(shape, start, whole_start)
    if whole_start < whole_end:
        rows = (whole_end - whole_start) // row
        yield (whole_start // row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from _within_row(shape, whole_end, end)


def _within_row(shape: tuple[int, ...], start: int, end: int) -> Iterator[Block]:
    index, first = divmod(start, math.prod(shape[1:]))
    for offset, inner in blocks(shape[1:], first, first + end - start):
        yield (index, *offset), (1, *inner)
