"""Sharded checkpoints: every rank writes, hashes and reads its own part.

Every function here that takes `ranks` is called by all ranks, and raises the same CheckpointError
on all of them or on none.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.metadata import Metadata

from mixtron.launch.agreement import everywhere, gather, on_first
from mixtron.launch.checkpoint_files import (
    FORMAT_VERSION,
    CheckpointError,
    begin,
    commit,
    file_problem,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
)
from mixtron.launch.checkpoint_identity import versions
from mixtron.launch.checkpoint_shards import (
    bytes_to_write,
    check_fit,
    gather_on_first,
    leave_out,
    model_shards,
    plan_pieces,
    random_states_shard,
    read_shards,
    shards_to_save,
    write_metadata,
)
from mixtron.launch.checkpoint_writer import MAX_FILES, HostMemory, Writing, Written
from mixtron.launch.exit_codes import RETRYABLE
from mixtron.launch.random_states import reseed, restore_random_states
from mixtron.megatron_ext.optimizer_state import (
    optimizer_shards,
    optimizer_step,
    set_optimizer_step,
)
from mixtron.megatron_ext.parallel import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveReport:
    path: Path
    step: int
    seconds: float
    """From the beginning to the commit."""
    bytes: int
    """Of all ranks' files."""
    writing_s: float
    """Of them, until the slowest rank's files were on the disk."""


# Saving


class PendingSave:
    """A checkpoint whose files are being written while the caller goes on.

    All ranks make it and call `finish` at the same point. Nothing in the background communicates.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        wrapped: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        ranks: Ranks,
        *,
        state: dict,
        config: dict,
        memory: HostMemory | None = None,
    ):
        """Starts to write `root/step_<step>` with everything that a bit-exact continuation needs.

        Args:
            state: what the caller needs to continue (counters, data cursors); JSON-able; small.
            config: the run's resolved configuration; JSON-able.
            memory: where tensors are copied to first. None: they are not, and must not change
                before `finish` has returned.
        Raises:
            CheckpointError: nothing was begun.
        """
        self._started = time.perf_counter()
        self.step = step
        self._root, self._ranks = root, ranks
        self._temporary = on_first(ranks, lambda: begin(root, step))
        try:
            shards = shards_to_save(wrapped, optimizer, ranks)
            self.bytes = sum(gather(bytes_to_write(shards)))
            self._check_free_space()
            pieces, self._metadata = plan_pieces(shards, ranks)
            if memory is not None:
                pieces = everywhere(ranks, lambda: memory.copy(pieces))
            self._manifest = {
                "format_version": FORMAT_VERSION,
                "step": step,
                "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "optimizer_step": max(gather(everywhere(ranks, lambda: optimizer_step(optimizer)))),
                "layout": _layout(wrapped, ranks),
                "versions": versions() if ranks.is_first else {},
                "state": state,
                "config": config,
            }
            on_first(ranks, lambda: json.dumps(self._manifest))
            self._writing = Writing(self._temporary, ranks.world_rank, pieces)
        except CheckpointError:
            self._abandon()
            raise
        self.blocked_s = time.perf_counter() - self._started
        """How long the caller was kept from going on, so far."""

    @property
    def running(self) -> bool:
        """Whether this rank still writes."""
        return self._writing.running

    def finish(self) -> SaveReport:
        """Waits for all ranks' files and commits: only then the checkpoint is there.

        Raises:
            CheckpointError: nothing was committed, earlier checkpoints are as they were. Exit code
                76 for I/O failures, a full disk among them.
        """
        waited = time.perf_counter()
        try:
            written = everywhere(self._ranks, self._writing.wait)
            everyones = gather_on_first(written, self._ranks)
            place = (self._temporary, self._metadata, everyones or [])
            path, size = on_first(self._ranks, lambda: _commit(*place, self._manifest))
            seconds = max(gather(written.seconds))
        except CheckpointError:
            self._abandon()
            raise
        self.blocked_s += time.perf_counter() - waited
        return SaveReport(path, self.step, time.perf_counter() - self._started, size, seconds)

    def _check_free_space(self) -> None:
        # Headers, random states, manifest.
        needed = int(1.02 * self.bytes) + self._ranks.world_size * 2**16

        def check() -> None:
            free = shutil.disk_usage(self._root).free
            if needed > free:
                raise CheckpointError(
                    f"{self._root}: the checkpoint needs about {needed / 2**30:,.2f} GiB and "
                    f"{free / 2**30:,.2f} GiB are free; make room or lower checkpoint.keep",
                    RETRYABLE,
                )

        on_first(self._ranks, check)

    def _abandon(self) -> None:
        on_first(self._ranks, lambda: shutil.rmtree(self._temporary, ignore_errors=True))


def _commit(
    temporary: Path, metadata: Metadata | None, everyones: list[Written], manifest: dict
) -> tuple[Path, int]:
    """On rank 0, when everything is on the disk; the checkpoint and its bytes."""
    assert metadata is not None
    files = write_metadata(temporary, metadata, [written.results for written in everyones])
    for written in everyones:
        files |= written.files
    path = commit(temporary, manifest["step"], {**manifest, "files": files})
    return path, sum(entry["bytes"] for entry in files.values())


def write_checkpoint(root: Path, shards: dict, manifest: dict, ranks: Ranks) -> Path:
    """Writes given shards under a given manifest, in one process that has all of them."""
    temporary = begin(root, manifest["step"])
    try:
        pieces, metadata = plan_pieces(shards, ranks)
        written = Writing(temporary, ranks.world_rank, pieces).wait()
        return _commit(temporary, metadata, [written], manifest)[0]
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
    """Writes `root/step_<step>` and returns when it is there; see `PendingSave`."""
    pending = PendingSave(root, step, wrapped, optimizer, ranks, state=state, config=config)
    return pending.finish()


def _layout(wrapped: list, ranks: Ranks) -> dict[str, int]:
    return {
        "tensor": ranks.tensor_size,
        "pipeline": ranks.pipeline_size,
        "virtual_pipeline": len(wrapped),
        "context": ranks.context_size,
        "data": ranks.data_size,
    }


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


def check_checkpoint(path: Path, ranks: Ranks) -> None:
    """Raises CheckpointError, exit code 2, unless all of it is there and its hashes are right."""
    on_first(ranks, lambda: verify_checkpoint(path, hashes=False))
    if problem := _damage(path, ranks):
        raise CheckpointError(problem)


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
    with ThreadPoolExecutor(MAX_FILES) as pool:
        problems = list(pool.map(lambda n: file_problem(path / n, files[n], hashes=True), own))
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
    check_fit(path, wanted, wrapped, ranks, with_optimizer=True)
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


def load_weights(
    path: Path, wrapped: list, ranks: Ranks, *, allowed: Sequence[str] = ()
) -> list[str]:
    """Restores the model alone, from a checkpoint of any parallel layout.

    Args:
        wrapped: this rank's chunks, with or without gradient buffers. An optimizer that was built
            on them before still holds its old main parameters.
        allowed: patterns of names that may be missing, unexpected or of another shape: these
            parameters stay as they are.
    Returns:
        The names that were left out.
    Raises:
        CheckpointError: names of tensors that are missing, unexpected or of another shape.
    """
    on_first(ranks, lambda: verify_checkpoint(path, hashes=False))
    wanted = everywhere(ranks, lambda: model_shards(wrapped, ranks))
    left_out = check_fit(path, wanted, wrapped, ranks, with_optimizer=False, allowed=allowed)
    if left_out:
        wanted = leave_out(wanted, left_out)
    read_shards(path, wanted, wrapped, ranks)
    return left_out


def _seed(manifest: dict) -> int:
    """A seed that no earlier part of the run used."""
    text = json.dumps([manifest["step"], manifest["config"]])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
