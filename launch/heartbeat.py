"""A rank's signs of life: where it is and since when, for the watchdog of its node.

Without a watchdog (`MIXTRON_HEARTBEATS` is not set) a beat does nothing.
"""

import faulthandler
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

HEARTBEATS_VARIABLE = "MIXTRON_HEARTBEATS"
"""A folder on the node's own disk, one for each launch."""
LOGS_VARIABLE = "MIXTRON_LOGS"
"""A folder in the run folder, one for each launch; each rank's output and stacks go there."""
STOP_FILE = "stop"
"""In the heartbeats' folder: a stop was asked for, maybe before the ranks could hear signals."""
DUMP_SIGNAL = signal.SIGUSR2
_RECORD_BYTES = 256

Phase = Literal["start", "load", "first_step", "step", "evaluate", "save", "done"]


@dataclass(frozen=True)
class Beat:
    """The last sign of life of one rank."""

    rank: int
    pid: int
    phase: Phase
    step: int
    count: int
    """Beats since the rank began."""
    time_s: float
    """On the node's monotonic clock."""
    limit_s: float | None
    """How long this phase may last until the next beat; None: for ever."""


class Heartbeat:
    """Writes one rank's beats. `beat` costs one small write to local memory or disk."""

    def __init__(self, folder: Path, rank: int):
        self.rank = rank
        self.limits_s: dict[str, float] = {"start": 1800.0}
        self._count = 0
        self._file = os.open(folder / f"rank_{rank:05d}", os.O_WRONLY | os.O_CREAT, 0o600)

    def beat(self, phase: Phase, step: int) -> None:
        self._count += 1
        limit_s = self.limits_s.get(phase)
        beat = Beat(self.rank, os.getpid(), phase, step, self._count, time.monotonic(), limit_s)
        os.pwrite(self._file, json.dumps(asdict(beat)).encode().ljust(_RECORD_BYTES), 0)


_heartbeat: Heartbeat | None = None


def begin(rank: int) -> None:
    """First beat of a process; its stacks can be asked for by SIGUSR2 from here on."""
    global _heartbeat
    folder, logs = os.environ.get(HEARTBEATS_VARIABLE), os.environ.get(LOGS_VARIABLE)
    faulthandler.enable()
    if folder is None or logs is None:
        return
    stacks = open(stacks_file(Path(logs), rank), "w")  # noqa: SIM115 (open as long as the process)
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
    _heartbeat = Heartbeat(Path(folder), rank)
    _heartbeat.beat("start", 0)


def set_limits(limits_s: dict[str, float]) -> None:
    """How long each phase may last; phases that are not named may last for ever."""
    if _heartbeat is not None:
        _heartbeat.limits_s = limits_s


def beat(phase: Phase, step: int = 0) -> None:
    """Says that this rank is alive and enters, or goes on with, `phase`."""
    if _heartbeat is not None:
        _heartbeat.beat(phase, step)


def stop_requested() -> bool:
    """Whether a stop was asked for since this launch began, by a signal that none heard."""
    folder = os.environ.get(HEARTBEATS_VARIABLE)
    return folder is not None and (Path(folder) / STOP_FILE).exists()


def read_beats(folder: Path) -> list[Beat]:
    """The last beat of every rank that beats into `folder`, by rank."""
    beats = []
    for path in sorted(folder.glob("rank_*")):
        try:
            beats.append(Beat(**json.loads(path.read_bytes())))
        except (ValueError, TypeError):
            continue  # in the middle of being written: the next look will find it whole
    return beats


def stacks_file(logs: Path, rank: int) -> Path:
    return logs / f"stacks_rank_{rank:05d}.txt"


def rank_log(logs: Path, rank: int) -> Path:
    return logs / f"rank_{rank:05d}.log"
