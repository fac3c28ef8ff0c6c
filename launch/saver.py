"""A run's checkpoints: at most one being written at a time, beside training if so configured."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megatron.core.optimizer import MegatronOptimizer

from mixtron.launch.agreement import everywhere
from mixtron.launch.checkpoint import PendingSave
from mixtron.launch.checkpoint_files import delete
from mixtron.launch.checkpoint_folder import set_aside_old
from mixtron.launch.checkpoint_shards import plan_pieces, shards_to_save
from mixtron.launch.checkpoint_writer import HostMemory, bytes_to_copy
from mixtron.launch.config import RunConfig
from mixtron.launch.config_sections import CheckpointConfig
from mixtron.megatron_ext.parallel import Ranks


class Saver:
    """All ranks call every method at the same point; `writing` alone is a rank's own."""

    def __init__(
        self, root: Path, config: CheckpointConfig, ranks: Ranks, say: Callable[[str], None]
    ):
        self.root = root
        self.newest_step: int | None = None
        """Of the newest checkpoint that was committed or loaded, if there is one."""
        self._config, self._ranks, self._say = config, ranks, say
        self._memory = HostMemory(ranks.device) if config.asynchronous else None
        self._pending: PendingSave | None = None
        self._deletions = ThreadPoolExecutor(1)
        self._deletion: Future | None = None
        self._remove_others = True
        self._timings: dict[str, float] = {}

    def reserve(self, wrapped: list, optimizer: MegatronOptimizer) -> None:
        """Takes the host memory before training, which the first save would have to wait for."""
        memory = self._memory
        if memory is not None and self._ranks.device.type == "cuda":
            shards = shards_to_save(wrapped, optimizer, self._ranks)
            pieces, _ = plan_pieces(shards, self._ranks)
            everywhere(self._ranks, lambda: memory.reserve(bytes_to_copy(pieces)))

    @property
    def writing(self) -> bool:
        """Whether this rank still writes."""
        return self._pending is not None and self._pending.running

    def save(
        self,
        step: int,
        wrapped: list,
        optimizer: MegatronOptimizer,
        state: dict,
        config: RunConfig,
        *,
        remove_others: bool = True,
    ) -> None:
        """Begins a checkpoint when the one before is complete; waits for it if not asynchronous.

        Args:
            remove_others: whether this one may take the place of older ones.
        """
        started = time.perf_counter()
        self.close()  # of those beyond `keep` this one may need the room
        pending = PendingSave(
            self.root,
            step,
            wrapped,
            optimizer,
            self._ranks,
            state=state,
            config=config.model_dump(mode="json"),
            memory=self._memory,
        )
        pending.blocked_s = time.perf_counter() - started
        self._pending, self._remove_others = pending, remove_others
        self._say(
            f"step {step} | saving a checkpoint of {pending.bytes / 2**20:,.1f} MiB "
            f"(training waited {pending.blocked_s:.2f} s)"
        )
        if self._memory is None:
            self.finish()

    def finish(self) -> None:
        """Commits the checkpoint under way, if there is one, and begins to delete those beyond
        `keep`, which the next save or `close` waits for."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        report = pending.finish()
        started = time.perf_counter()
        self.newest_step = report.step
        if self._remove_others:
            keep, every = self._config.keep, self._config.keep_every_steps
            old = set_aside_old(self.root, keep, self._ranks, keep_every_steps=every)
            # A large folder takes seconds to delete, which training need not wait for.
            self._deletion = self._deletions.submit(delete, old)
            if self._memory is None:
                self._finish_deletion()
        blocked_s = pending.blocked_s + time.perf_counter() - started
        self._timings = {
            "checkpoint/blocked_s": blocked_s,
            "checkpoint/seconds": report.seconds,
            "checkpoint/gib": report.bytes / 2**30,
        }
        rate = report.bytes / 2**20 / max(report.writing_s, 1e-9)
        self._say(
            f"step {report.step} | saved {report.path} ({report.bytes / 2**20:,.1f} MiB, "
            f"{report.seconds:.2f} s, written at {rate:,.0f} MiB/s; training waited "
            f"{blocked_s:.2f} s)"
        )

    def close(self) -> None:
        """At the end of a run: commits, and waits until those beyond `keep` are gone."""
        self.finish()
        self._finish_deletion()

    def _finish_deletion(self) -> None:
        deletion, self._deletion = self._deletion, None
        if deletion is not None:
            deletion.result()

    def take_timings(self) -> dict[str, float]:
        """What the last save cost, once."""
        timings, self._timings = self._timings, {}
        return timings
