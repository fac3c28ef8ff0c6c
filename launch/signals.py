"""A stop that is asked for by signal or a time limit, and agreed on by all ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from mixtron.launch.exit_codes import PREEMPTED

if TYPE_CHECKING:
    import torch


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def hear(handler: Callable[[int, FrameType | None], None]) -> None:
    """Calls the handler for the signals that stop a run."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler)
    unblock()


def unblock() -> None:
    """A process inherits which signals are blocked, and would never hear of these."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class Stopped(Exception):
    """A stop before anything was trained that is not saved yet."""

    exit_code = PREEMPTED


class StopFlag:
    """Set by SIGTERM or SIGUSR1 in the main process; a second signal changes nothing.

    Made first thing in a rank, before the seconds of importing torch, when signals would kill it.
    The signals are blocked and looked for: LLVM, by which Triton compiles a kernel, puts handlers
    of its own in the place of Python's, and SIGUSR1 would never be heard of again.
    """

    deadline_s: float | None = None
    """On the monotonic clock: when the run is to stop by itself."""

    def __init__(self):
        self.signal: int | None = None
        self._pid = os.getpid()
        self._started_s = time.monotonic()
        # A thread that was there before does not block them, and hears of them by the handler.
        hear(self._receive)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _receive(self, number: int, frame) -> None:
        if os.getpid() == self._pid and self.signal is None:
            self.signal = number

    def limit_duration(self, seconds: float | None) -> None:
        """Stops the run this long after it began."""
        self.deadline_s = None if seconds is None else self._started_s + seconds

    def requested(self) -> bool:
        """Whether this rank alone was asked to stop."""
        received = signal.sigtimedwait(STOP_SIGNALS, 0)
        if received is not None and self.signal is None:
            self.signal = received.si_signo
        late = self.deadline_s is not None and time.monotonic() > self.deadline_s
        return self.signal is not None or late

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop. All ranks call it at the same point."""
        from mixtron.launch.agreement import any_rank

        return any_rank(device, self.requested())[0]

    def stop_if_agreed(self, device: torch.device, where: str) -> None:
        """Raises Stopped on all ranks, if any was asked to stop."""
        if self.agreed(device):
            raise Stopped(f"stopped on request {where}; nothing new to save")
