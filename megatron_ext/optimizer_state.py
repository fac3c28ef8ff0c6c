"""An optimizer's state as shards of whole tensors, for checkpoints of any layout and engine.

A data-parallel rank owns a contiguous range of each parameter's elements. Megatron's
`fully_reshardable` checkpoint format gathers these ranges into whole tensors in every rank's
memory, when saving and when loading. A contiguous range of a row-major tensor is also the union of
a few rectangular blocks, and a checkpoint can hold blocks: so each rank stores its own range and
reads its own range, in place, without communication. Keys and shapes are those of
`fully_reshardable`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mixtron.megatron_ext.parallel import Ranks

STATES = ("param", "exp_avg", "exp_avg_sq")
"""The fp32 main parameter and Adam's two moments."""
PREFIX = "optimizer.state."


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Elements [start, start + n) of a parameter, and what this rank holds of them."""

    parameter: torch.nn.Parameter
    start: int
    tensors: dict[str, Tensor]
    """Flat, of n elements each, by what their keys in a checkpoint begin with."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where elements of a parameter are stored: itself, or one of its fused components."""

    shard: ShardedTensor
    """Without data."""
    first: int
    """The first of them in the parameter, which holds them in one piece."""


@functools.singledispatch
def optimizer_shards(optimizer: MegatronOptimizer, model_shards: dict) -> list[ShardedTensor]:
    """This rank's part of the optimizer's state; the tensors are views of the optimizer's own.

    Moments that do not exist yet (no step was taken) are made, as zeros.

    Args:
        model_shards: the model's sharded state dict, whose data are the parameters themselves.
    """
    return list(rectangles(_fragments(optimizer), places(model_shards)))


@functools.singledispatch
def adam_states(optimizer: MegatronOptimizer) -> Iterator[dict]:
    """AdamW's state of everything that this rank updates."""
    for part in _parts(optimizer):
        yield from part.optimizer.state.values()


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """Steps that Adam has taken, 0 where this rank owns no element of any parameter."""
    steps = {int(state["step"]) for state in adam_states(optimizer)}
    if len(steps) > 1:
        raise ValueError(f"parameters differ in their Adam step: {sorted(steps)}")
    return steps.pop() if steps else 0


def set_optimizer_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Each parameter gets a counter of its own: a shared one would be counted up once for each."""
    for state in adam_states(optimizer):
        state["step"] = torch.full_like(state["step"], float(step))


def allocate_moments(adam: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """What AdamW makes at its first step."""
    # The fused kernel counts steps on the device.
    fused = any(group.get("fused") for group in adam.param_groups)
    for parameter in parameters:
        state = adam.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
            state["exp_avg"] = torch.zeros_like(parameter.detach())
            state["exp_avg_sq"] = torch.zeros_like(parameter.detach())


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            raise TypeError(
                f"optimizer {type(part.optimizer).__module__}.{type(part.optimizer).__name__}: "
                "only the state of torch.optim.AdamW can be stored"
            )
    return parts


def _fragments(optimizer: MegatronOptimizer) -> Iterator[Fragment]:
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            allocate_moments(part.optimizer, group["params"])
        for parameter, main in _owned(part):
            held = part._get_model_param_range_map(parameter)["param"]
            yield Fragment(parameter, held.start, state_tensors(main, part.optimizer))


def state_tensors(main: Tensor, adam: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The fp32 main parameter and its moments, by what their keys begin with."""
    tensors = {"param": main, **adam.state[main]}
    return {f"{PREFIX}{name}.": tensors[name] for name in STATES}


def _owned(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
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


def weight_shards(chunk: Any, ranks: Ranks) -> dict:
    """Where each parameter of a chunk lies in the whole model, by its name in the chunk."""
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": ranks.groups.dp_cp}
    everything = chunk.sharded_state_dict(metadata=metadata)
    # Megatron's linear layers add an object each, always empty.
    tensors = {k: v for k, v in everything.items() if not isinstance(v, ShardedObject)}
    if absent := {name for name, _ in chunk.named_parameters()} - tensors.keys():
        raise ValueError(f"sharded_state_dict lacks parameters {', '.join(sorted(absent))}")
    return tensors


def stored_tensors(shard: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """What a parameter becomes in a checkpoint: itself, or its fused components."""
    if isinstance(shard, ShardedTensorFactory):
        return list(nested_values(shard.build()))
    return [shard]


def places(model_shards: dict) -> dict[torch.nn.Parameter, list[Place]]:
    """Of each parameter, in a model's sharded state dict whose data are the parameters."""
    found = {}
    for shard in nested_values(model_shards):
        pieces = stored_tensors(shard)
        found[shard.data] = [_place(shard.data, piece) for piece in pieces]
    return found


def _place(parameter: Tensor, piece: ShardedTensor) -> Place:
    assert piece.data is not None
    if not piece.data.is_contiguous() or piece.prepend_axis_num:
        raise ValueError(f"{piece.key}: optimizer state needs contiguous parts of the parameter")
    first = int(piece.data.storage_offset() - parameter.storage_offset())
    return Place(piece.without_data(), first)


def rectangles(
    fragments: Iterable[Fragment], places: dict[torch.nn.Parameter, list[Place]]
) -> Iterator[ShardedTensor]:
    """What is stored of fragments: shards of rectangular blocks, whose data are views of them."""
    for fragment in fragments:
        count = next(iter(fragment.tensors.values())).numel()
        for place in places[fragment.parameter]:
            size = math.prod(place.shard.local_shape)
            low = max(fragment.start, place.first)
            high = min(fragment.start + count, place.first + size)
            yield from _within_place(fragment, place, low, high)


def _within_place(fragment: Fragment, place: Place, low: int, high: int) -> Iterator[ShardedTensor]:
    """The shards of the parameter's elements [low, high), which lie in one place."""
    position = low - fragment.start
    shard = place.shard
    for offset, shape in blocks(shard.local_shape, low - place.first, high - place.first):
        count = math.prod(shape)
        for prefix, flat in fragment.tensors.items():
            data = flat.detach()[position : position + count].view(shape)
            yield dataclasses.replace(
                shard,
                key=f"{prefix}{shard.key}",
                data=data,
                dtype=data.dtype,
                local_shape=shape,
                global_offset=tuple(map(sum, zip(shard.global_offset, offset, strict=True))),
                axis_fragmentations=None,
                # Data-parallel ranks hold different elements: none is a replica of another.
                replica_id=(*shard.replica_id[:-1], 0),  # type: ignore[index]
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
