"""A stop that is asked for by signal and agreed on by all ranks."""

import os
import signal

import torch

from mixtron.launch.agreement import any_rank


class StopFlag:
    """Set by SIGTERM or SIGUSR1 in the main process; a second signal changes nothing."""

    def __init__(self):
        self.signal: int | None = None
        self._pid = os.getpid()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame) -> None:
        if os.getpid() == self._pid and self.signal is None:
            self.signal = number

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was signalled. All ranks call it at the same point."""
        return any_rank(device, self.signal is not None)[0]
