"""What ranks hold of the model and the optimizer, to and from Megatron's distributed format.

All functions are called by all ranks.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from mixtron.launch.agreement import everywhere, on_first
from mixtron.launch.checkpoint_files import CheckpointError, sync_and_hash
from mixtron.launch.checkpoint_writer import Piece
from mixtron.launch.random_states import random_states
from mixtron.megatron_ext.deepspeed_engine import ZeroModel
from mixtron.megatron_ext.optimizer_state import (
    PREFIX,
    STATES,
    optimizer_shards,
    stored_tensors,
    weight_shards,
)
from mixtron.megatron_ext.parallel import Ranks


def model_shards(wrapped: list, ranks: Ranks) -> dict:
    """Where each parameter of this rank's chunks lies in the whole model."""
    return {f"model{i}": _shards_of(chunk, ranks) for i, chunk in enumerate(wrapped)}


def _shards_of(chunk: Any, ranks: Ranks) -> dict:
    if isinstance(chunk, ZeroModel):
        return chunk.shards(ranks)
    return weight_shards(_bare(chunk), ranks)


def _bare(chunk: DistributedDataParallel | ZeroModel | GPTModel) -> GPTModel:
    return chunk.module if isinstance(chunk, DistributedDataParallel | ZeroModel) else chunk  # type: ignore


def _partitioned(wrapped: list) -> bool:
    """Whether each data rank holds a part of the weights, rather than all of them."""
    return any(isinstance(chunk, ZeroModel) and not chunk.whole for chunk in wrapped)


def random_states_shard(ranks: Ranks, states: dict | None) -> ShardedObject:
    return ShardedObject("random_states", states, (ranks.world_size,), (ranks.world_rank,))


def common_state_shard(ranks: Ranks) -> ShardedObject:
    """Empty; Megatron's loader expects one."""
    return ShardedObject("common_state", {}, (1,), (0,), ranks.world_rank)


def shards_to_save(
    wrapped: list[DistributedDataParallel], optimizer: MegatronOptimizer, ranks: Ranks
) -> dict:
    """Everything that this rank holds, each replicated tensor marked as one rank's to write."""
    for chunk in wrapped:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            # Other ranks' updates would arrive only in the next forward.
            chunk.start_param_sync(force_sync=True)
    model = everywhere(ranks, lambda: model_shards(wrapped, ranks))
    moments = everywhere(ranks, lambda: optimizer_shards(optimizer, model))
    if not _partitioned(wrapped):
        _share_out_replicas(model, ranks)
    return {
        **model,
        "optimizer": dict(enumerate(moments)),
        "random_states": random_states_shard(ranks, random_states()),
        "common_state": common_state_shard(ranks),
    }


def _share_out_replicas(model: dict, ranks: Ranks) -> None:
    """Data ranks hold the same weights: each becomes the writer of some."""
    apply_factories(model)
    everyones = gather_on_first([shard.without_data() for shard in nested_values(model)], ranks)
    on_first(ranks, lambda: validate_sharding_integrity(everyones))  # type: ignore[arg-type]
    group = ranks.groups.dp_cp
    distribution = determine_main_replica_uniform_distribution(model, group)
    distribute_main_replicas_with_precomputed_distribution(model, group, distribution)


def bytes_to_write(shards: dict) -> int:
    """Of this rank's tensors."""
    return sum(
        shard.data.numel() * shard.data.element_size()  # type: ignore[union-attr]
        for shard in nested_values(shards)
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id)
    )


def plan_pieces(shards: dict, ranks: Ranks) -> tuple[list[Piece], Metadata | None]:
    """What this rank writes, and on rank 0 which tensor of the whole consists of what.

    Not through `dist_checkpointing.save`: it starts a manager process, and where one rank fails in
    it the others wait.
    """
    planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan() -> SavePlan:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(shards, True)
        planner.set_up_planner(mcore_to_pyt_state_dict(by_key), is_coordinator=ranks.is_first)
        return planner.create_local_plan()

    own = everywhere(ranks, plan)
    plans = gather_on_first(own, ranks)
    merged: list[Metadata] = []
    # Checks that the pieces of all ranks cover each tensor once. No rank's own plan changes by it.
    on_first(ranks, lambda: merged.append(planner.create_global_plan(plans or [])[1]))
    pieces = everywhere(ranks, lambda: [(i, planner.resolve_data(i)) for i in own.items])
    return pieces, merged[0] if merged else None


def write_metadata(
    folder: Path, metadata: Metadata, results: list[list[WriteResult]]
) -> dict[str, dict]:
    """Writes on rank 0 what `dist_checkpointing.load` finds tensors by; the manifest's entries."""
    FileSystemWriter(folder).finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    return {name: sync_and_hash(folder / name) for name in (".metadata", "metadata.json")}


def read_shards(path: Path, wanted: dict, wrapped: list, ranks: Ranks) -> dict:
    """Reads into the tensors of `wanted`; returns the objects beside them."""

    def read() -> dict:
        loaded = dist_checkpointing.load(wanted, str(path), validate_access_integrity=False)
        for i, chunk in enumerate(wrapped):
            weights = loaded.pop(f"model{i}")  # type: ignore
            if _partitioned([chunk]):
                chunk.gather_persistent()
            else:
                # Names were compared before; Megatron's empty objects are not in it.
                _bare(chunk).load_state_dict(weights, strict=False)  # type: ignore
        return loaded  # type: ignore[return-value]

    return everywhere(ranks, read)


def check_fit(
    path: Path,
    wanted: dict,
    wrapped: list,
    ranks: Ranks,
    *,
    with_optimizer: bool,
    allowed: Sequence[str] = (),
) -> list[str]:
    """Holds names and shapes of the whole model against those in the checkpoint.

    Args:
        allowed: patterns (`fnmatch`) of names that may differ.
    Returns:
        The names that differ and may.
    Raises:
        CheckpointError: names what is missing, unexpected or of another shape.
    """
    own = {}
    if _partitioned(wrapped) or ranks.groups.dp_cp.rank() == 0:
        own = {
            tensor.key: tuple(tensor.global_shape)
            for shard in nested_values(wanted)
            for tensor in stored_tensors(shard)
        }
    everyones = gather_on_first(own, ranks)

    def compare() -> list[str]:
        model = {key: shape for part in everyones or [] for key, shape in part.items()}
        metadata = FileSystemReader(path).read_metadata()
        stored = {
            key: tuple(entry.size)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        moments = {key: stored.pop(key) for key in list(stored) if key.startswith(PREFIX)}
        differ = [k for k in sorted(model.keys() | stored.keys()) if model.get(k) != stored.get(k)]
        left_out = [key for key in differ if any(fnmatchcase(key, p) for p in allowed)]
        for key in left_out:
            model.pop(key, None)
            stored.pop(key, None)
        differences = list(_differences(model, stored))
        if not differences and with_optimizer:
            expected = {f"{PREFIX}{s}.{key}": shape for key, shape in model.items() for s in STATES}
            differences = list(_differences(expected, moments))
        if differences:
            raise CheckpointError(f"{path} does not fit this model: {'; '.join(differences)}")
        return left_out

    return on_first(ranks, compare)


def leave_out(wanted: dict, names: Sequence[str]) -> dict:
    """The shards without those that have one of the names, or a fused part that has."""
    return {
        chunk: {
            name: shard
            for name, shard in shards.items()
            if not any(tensor.key in names for tensor in stored_tensors(shard))
        }
        for chunk, shards in wanted.items()
    }


def gather_on_first(value: object, ranks: Ranks) -> list | None:
    """The value of every rank on rank 0, None on the others."""
    values: list | None = [None] * ranks.world_size if ranks.is_first else None
    dist.gather_object(value, values, dst=0)
    return values


def _differences(model: dict[str, tuple], stored: dict[str, tuple]) -> Iterator[str]:
    if missing := sorted(model.keys() - stored.keys()):
        yield f"missing in the checkpoint: {', '.join(missing)}"
    if unexpected := sorted(stored.keys() - model.keys()):
        yield f"unexpected in the checkpoint: {', '.join(unexpected)}"
    for key in sorted(model.keys() & stored.keys()):
        if model[key] != stored[key]:
            yield f"{key} has shape {list(stored[key])}, the model's has {list(model[key])}"
