"""One job to a run folder, and no rank that outlives its job."""

import ctypes
import fcntl
import os
import signal
import socket
import time
from pathlib import Path
from typing import IO

from mixtron.megatron_ext.errors import ConfigError

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Asks Linux to send this process a signal when the one that started it is gone.

    torchrun starts its ranks in sessions of their own: without this they go on training when it is
    killed, beside the job that was started anew.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def die_with_torchrun() -> None:
    """The same for a rank, if torchrun started it: a shell may well go before a run ends."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)


_held: IO | None = None


def lock_run_folder(run_dir: Path, patience_s: float = 5.0) -> None:
    """Holds `run_dir`/lock until this process ends or locks another folder.

    Raises:
        ConfigError: another job still holds it after `patience_s`; says which.
    """
    global _held
    unlock_run_folder()
    run_dir.mkdir(parents=True, exist_ok=True)
    file = open(run_dir / "lock", "a+")  # noqa: SIM115
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise ConfigError(
                    f"run_dir={run_dir}: another job is running there ({file.read().strip()}); "
                    "stop it, or give this one another run_dir"
                ) from None
            time.sleep(0.2)
    file.truncate(0)
    file.write(f"host {socket.gethostname()}, process {os.getpid()}\n")
    file.flush()
    _held = file


def unlock_run_folder() -> None:
    """Lets go of the folder that this process holds, for a process that outlives its run."""
    global _held
    if _held is not None:
        _held.close()
        _held = None
