"""Sharded checkpoints: every rank writes, hashes and reads its own part.

Every function here that takes `ranks` is called by all ranks, and raises the same CheckpointError
on all of them or on none.
"""

import hashlib
import json
import logging
import secrets
import shutil
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from mixtron.launch.agreement import everywhere, gather, on_first
from mixtron.launch.checkpoint_files import (
    FORMAT,
    CheckpointError,
    begin,
    commit,
    file_problem,
    list_checkpoints,
    read_manifest,
    remove_leftovers,
    set_aside,
    sync_and_hash,
    verify_checkpoint,
)
from mixtron.launch.checkpoint_shards import (
    bytes_to_write,
    check_fit,
    files_of_rank,
    model_shards,
    random_states_shard,
    read_shards,
    shards_to_save,
    write_shards,
)
from mixtron.launch.exit_codes import RETRYABLE
from mixtron.launch.random_states import reseed, restore_random_states
from mixtron.megatron_ext.optimizer_state import (
    optimizer_shards,
    optimizer_step,
    set_optimizer_step,
)
from mixtron.megatron_ext.parallel import Ranks

logger = logging.getLogger(__name__)

SHARED_FOLDER_WAIT_S = 5.0
"""How long a rank looks for what rank 0 wrote: network file systems show new files late."""


@dataclass(frozen=True)
class SaveReport:
    path: Path
    seconds: float
    bytes: int
    """Of all ranks' files."""


# Saving


def save_checkpoint(
    root: Path,
    step: int,
    wrapped: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    ranks: Ranks,
    *,
    state: dict,
    config: dict,
) -> SaveReport:
    """Writes `root/step_<step>` with everything that a bit-exact continuation needs.

    Written under another name and renamed when every file is on the disk: a checkpoint is complete
    or not there.

    Args:
        state: what the caller needs to continue (counters, data cursors); JSON-able; small.
        config: the run's resolved configuration; JSON-able.
    Raises:
        CheckpointError: nothing was committed, earlier checkpoints are as they were. Exit code 76
            for I/O failures, a full disk among them.
    """
    started = time.perf_counter()
    temporary = on_first(ranks, lambda: begin(root, step))
    try:
        shards = shards_to_save(wrapped, optimizer, ranks)
        _check_free_space(root, shards, ranks)
        write_shards(temporary, shards, ranks)
        files = _hash_own_files(temporary, ranks)
        manifest = {
            "format": FORMAT,
            "step": step,
            "optimizer_step": max(gather(everywhere(ranks, lambda: optimizer_step(optimizer)))),
            "layout": _layout(wrapped, ranks),
            "versions": {name: version(name) for name in ("mixtron", "megatron-core", "torch")},
            "files": files,
            "state": state,
            "config": config,
        }
        path = on_first(ranks, lambda: commit(temporary, step, manifest))
    except CheckpointError:
        on_first(ranks, lambda: shutil.rmtree(temporary, ignore_errors=True))
        raise
    size = sum(entry["bytes"] for entry in files.values())
    return SaveReport(path, time.perf_counter() - started, size)


def _layout(wrapped: list, ranks: Ranks) -> dict[str, int]:
    return {
        "tensor": ranks.tensor_size,
        "pipeline": ranks.pipeline_size,
        "virtual_pipeline": len(wrapped),
        "context": ranks.context_size,
        "data": ranks.data_size,
    }


def _check_free_space(root: Path, shards: dict, ranks: Ranks) -> None:
    # Headers, random states, manifest.
    needed = int(1.02 * sum(gather(bytes_to_write(shards)))) + ranks.world_size * 2**16

    def check() -> None:
        free = shutil.disk_usage(root).free
        if needed > free:
            raise CheckpointError(
                f"{root}: the checkpoint needs about {needed / 2**30:,.2f} GiB and "
                f"{free / 2**30:,.2f} GiB are free; make room or lower checkpoint.keep",
                RETRYABLE,
            )

    on_first(ranks, check)


def _hash_own_files(folder: Path, ranks: Ranks) -> dict[str, dict]:
    """Syncs and hashes on each rank what it wrote; the manifest entries of all."""
    own = files_of_rank(folder, ranks)
    hashed = everywhere(ranks, lambda: {path.name: sync_and_hash(path) for path in own})
    return {name: entry for files in gather(hashed) for name, entry in files.items()}


# Choosing


def find_checkpoint(root: Path, resume: str, ranks: Ranks) -> Path | None:
    """The checkpoint to continue from, its files hashed, or None for a new start.

    Args:
        resume: "auto" is the newest complete checkpoint, None if there is none; damaged ones are
            passed over with a warning. "none" is a new start. Else the path of one.
    Raises:
        CheckpointError: exit code 2: the path is not a complete checkpoint or is older than what
            the folder holds; "none" with checkpoints in the folder; all checkpoints damaged.
    """
    candidates = on_first(ranks, lambda: _candidates(root, resume))
    for path in candidates:
        problem = _damage(path, ranks)
        if not problem:
            return path
        if resume != "auto":
            raise CheckpointError(problem)
        _warn(ranks, f"{problem}; passing over {path.name}")
    if candidates:
        raise CheckpointError(_all_damaged(root))
    return None


def _candidates(root: Path, resume: str) -> list[Path]:
    """Folders to try, the newest first, complete as far as sizes tell."""
    found = list_checkpoints(root)
    if resume == "auto":
        for info in found:
            if not info.complete:
                logger.warning("%s; passing over %s", info.reason, info.path.name)
        complete = [info.path for info in reversed(found) if info.complete]
        if found and not complete:
            raise CheckpointError(_all_damaged(root))
        return complete
    if resume == "none":
        if found:
            raise CheckpointError(
                f"{root} holds {found[-1].path.name}: a new start would mix two runs; use "
                "checkpoint.resume=auto to continue, or another run_dir"
            )
        return []
    path = Path(resume)
    verify_checkpoint(path, hashes=False)
    newer = [i for i in found if i.complete and i.step > read_manifest(path)["step"]]
    if newer:
        raise CheckpointError(
            f"{root} holds {newer[-1].path.name}, which is newer than {path}: use "
            "checkpoint.resume=auto to continue from it, or move it away"
        )
    return [path]


def _all_damaged(root: Path) -> str:
    return f"{root}: no checkpoint is complete; move them away or use another run_dir to start anew"


def _damage(path: Path, ranks: Ranks) -> str:
    """The first file whose SHA-256 is wrong; each rank hashes its share of the files."""
    files = on_first(ranks, lambda: read_manifest(path)["files"])
    by_size = sorted(files, key=lambda name: files[name]["bytes"])
    own = by_size[ranks.world_rank :: ranks.world_size]
    problems = [file_problem(path / name, files[name], hashes=True) for name in own]
    return next((p for p in gather(next(filter(None, problems), "")) if p), "")


def _warn(ranks: Ranks, message: str) -> None:
    if ranks.is_first:
        logger.warning(message)


# Loading


def load_checkpoint(
    path: Path,
    wrapped: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    ranks: Ranks,
) -> dict:
    """Restores model, optimizer and random states from a checkpoint of any parallel layout.

    In the layout that it was saved in, the run continues bit for bit. In another one the random
    states are seeded anew, with a warning. Learning rate, weight decay and Adam's betas stay as
    configured now.

    Returns:
        The `state` that was given to `save_checkpoint`.
    Raises:
        CheckpointError: names of tensors that are missing, unexpected or of another shape.
    """
    manifest = on_first(ranks, lambda: read_manifest(path))
    wanted = everywhere(ranks, lambda: model_shards(wrapped, ranks))
    check_fit(path, wanted, ranks, with_optimizer=True)
    moments = everywhere(ranks, lambda: optimizer_shards(optimizer, wanted))
    wanted["optimizer"] = dict(enumerate(moments))
    same_layout = manifest["layout"] == _layout(wrapped, ranks)
    if same_layout:
        wanted["random_states"] = random_states_shard(ranks, None)

    loaded = read_shards(path, wanted, wrapped, ranks)
    everywhere(ranks, lambda: set_optimizer_step(optimizer, manifest["optimizer_step"]))
    if same_layout:
        everywhere(ranks, lambda: restore_random_states(loaded["random_states"]))
    else:
        everywhere(ranks, lambda: reseed(_seed(manifest), ranks))
        _warn(
            ranks, f"{path} was saved in another layout ({manifest['layout']}): dropout is reseeded"
        )
    return manifest["state"]


def load_weights(path: Path, wrapped: list, ranks: Ranks) -> None:
    """Restores the model alone, from a checkpoint of any parallel layout.

    Args:
        wrapped: this rank's chunks, with or without gradient buffers. An optimizer that was built
            on them before still holds its old main parameters.
    Raises:
        CheckpointError: names of tensors that are missing, unexpected or of another shape.
    """
    on_first(ranks, lambda: verify_checkpoint(path, hashes=False))
    wanted = everywhere(ranks, lambda: model_shards(wrapped, ranks))
    check_fit(path, wanted, ranks, with_optimizer=False)
    read_shards(path, wanted, wrapped, ranks)


def _seed(manifest: dict) -> int:
    """A seed that no earlier part of the run used."""
    text = json.dumps([manifest["step"], manifest["config"]])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


# The folder


def remove_old(root: Path, keep: int | None, ranks: Ranks) -> None:
    """Deletes complete checkpoints beyond the newest `keep` (None: none), and what dead saves left.

    Damaged checkpoints do not count and are left for a person to look at.

    Args:
        keep: at least 1.
    """

    def remove() -> list[Path]:
        complete = [info.path for info in list_checkpoints(root) if info.complete]
        for path in [] if keep is None else complete[:-keep]:
            set_aside(path)
        return remove_leftovers(root)

    for path in on_first(ranks, remove):
        _warn(ranks, f"{path}: could not be deleted")


def check_shared_folder(root: Path, ranks: Ranks) -> None:
    """Refuses a folder that is not the same on all ranks.

    Raises:
        CheckpointError: exit code 2; names the ranks that do not see what rank 0 wrote.
    """
    token = secrets.token_hex(8)

    def write() -> Path:
        try:
            root.mkdir(parents=True, exist_ok=True)
            file = root / f".shared-{token}"
            file.write_text(token)
        except OSError as error:
            raise CheckpointError(f"{root}: cannot be written: {error.strerror}") from None
        return file

    name = on_first(ranks, write).name
    blind = [rank for rank, seen in enumerate(gather(_appears(root / name))) if not seen]
    if ranks.is_first:
        (root / name).unlink()
    if blind:
        raise CheckpointError(
            f"{root} is not the same folder on all ranks: ranks {', '.join(map(str, blind))} do "
            "not see what rank 0 wrote; run_dir must lie on a file system that all nodes share"
        )


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + SHARED_FOLDER_WAIT_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
