"""A hang is found by the first supervisor whose ranks give no sign of life; all dump their stacks.

On the shared file system, `<logs>/hang/` is made by the one that finds it, and holds `task_N.json`
of every task and the verdict. Until then nothing is written there.
"""

import contextlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from mixtron.launch.heartbeat import DUMP_SIGNAL, Beat, read_beats, stacks_file
from mixtron.launch.slurm.task import Task
from mixtron.launch.whole_files import replaced

SHARED_POLL_S = 5.0
DUMP_S = 1.0
"""For the signal handlers to write their stacks."""
ANSWER_S = 3 * SHARED_POLL_S
NCCL_PIPE = "nccl_"
"""Prefix of the pipes, among the heartbeats, that tell NCCL's flight recorder to dump."""
_WAITING_FILES = (
    "torch/distributed/",
    "torch/cuda/",
    "megatron/core/distributed/",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "launch/agreement.py",
)
_WAITING_FUNCTIONS = {"agreed", "wait", "synchronize"}
_FRAME = re.compile(r'^  File "(?P<file>.*)", line \d+ in (?P<function>.*)$', re.MULTILINE)


@dataclass(frozen=True)
class RankState:
    """One rank at the time of a hang."""

    rank: int
    node: str
    phase: str
    step: int
    count: int
    silent_s: float
    waiting: bool
    """Its main thread waits for other ranks, or for its GPU."""


class HangWatch:
    """Looks after one task's ranks. Folders as the supervisor's."""

    def __init__(self, task: Task, logs: Path, heartbeats: Path):
        self.task, self.heartbeats, self.logs = task, heartbeats, logs
        self.folder = logs / "hang"
        self._next_shared_s = 0.0

    def hang_found(self) -> bool:
        """Whether the run hangs. If so, every task has dumped its ranks' stacks on return."""
        stuck = [beat for beat in read_beats(self.heartbeats) if _is_overdue(beat)]
        if not stuck and not self._found_by_another():
            return False
        self.folder.mkdir(exist_ok=True)
        states = self._dump_stacks()
        write_json(self.folder / f"task_{self.task.task:05d}.json", [vars(s) for s in states])
        self._conclude()
        return True

    def _found_by_another(self) -> bool:
        """Rarely looked up: the folder is on a file system that all nodes share."""
        if time.monotonic() < self._next_shared_s:
            return False
        self._next_shared_s = time.monotonic() + SHARED_POLL_S
        return self.folder.exists()

    def _dump_stacks(self) -> list[RankState]:
        beats = read_beats(self.heartbeats)
        for beat in beats:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, DUMP_SIGNAL)
        for pipe in self.heartbeats.glob(f"{NCCL_PIPE}*.pipe"):
            with contextlib.suppress(OSError):
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, b"1\n")
                os.close(descriptor)
        time.sleep(DUMP_S)
        return [self._state(beat) for beat in beats]

    def _state(self, beat: Beat) -> RankState:
        stacks = stacks_file(self.logs, beat.rank)
        text = stacks.read_text() if stacks.exists() else ""
        silent_s = time.monotonic() - beat.time_s
        return RankState(
            beat.rank, self.task.node, beat.phase, beat.step, beat.count, silent_s, is_waiting(text)
        )

    def _conclude(self) -> None:
        """Waits for every task's answer; the first one to have them all writes the verdict."""
        deadline_s = time.monotonic() + ANSWER_S
        names = [f"task_{task:05d}.json" for task in range(self.task.tasks)]
        while not all((self.folder / name).exists() for name in names):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.2)
        states, silent = [], []
        for task, name in enumerate(names):
            path = self.folder / name
            if path.exists():
                states += [RankState(**state) for state in json.loads(path.read_text())]
            else:
                silent.append(task)
        text = verdict(states, silent)
        try:
            with open(self.folder / "verdict", "x") as file:
                file.write(text + "\n")
        except FileExistsError:
            return
        print(f"mixtron: {text}\nmixtron: stacks of all ranks are in {self.logs}", flush=True)


def verdict(states: list[RankState], silent_tasks: list[int]) -> str:
    """One line that names who holds the others up, as far as it can be told."""
    if silent_tasks:
        return f"hang: no word from task {', '.join(map(str, silent_tasks))}"
    if not states:
        return "hang: no rank gave a sign of life"
    fewest = min(state.count for state in states)
    behind = [s for s in states if s.count == fewest]
    suspects = [s for s in behind if not s.waiting] or (behind if len(behind) < len(states) else [])
    if not suspects:
        return f"hang: all {len(states)} ranks wait in {states[0].phase}, step {states[0].step}"
    named = ", ".join(
        f"rank {s.rank} on {s.node} ({s.phase}, step {s.step}, silent for {s.silent_s:.0f} s)"
        for s in suspects[:8]
    )
    more = f" and {len(suspects) - 8} more" if len(suspects) > 8 else ""
    return f"hang: {named}{more} holds up {len(states) - len(suspects)} waiting ranks"


def is_waiting(stacks: str) -> bool:
    """Whether the main thread, the last that faulthandler lists, waits for others."""
    main = stacks.rstrip().rsplit("\n\n", 1)[-1]
    frames = list(_FRAME.finditer(main))[:3]
    return any(
        any(part in frame["file"] for part in _WAITING_FILES)
        or frame["function"] in _WAITING_FUNCTIONS
        for frame in frames
    )


def _is_overdue(beat: Beat) -> bool:
    return beat.limit_s is not None and time.monotonic() - beat.time_s > beat.limit_s


def write_json(path: Path, content: object) -> None:
    with replaced(path) as file:
        file.write_text(json.dumps(content))
