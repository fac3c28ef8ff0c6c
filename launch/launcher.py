"""Starts several ranks on this machine through torchrun."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from mixtron.launch import exit_codes
from mixtron.launch.lifetime import die_with_parent
from mixtron.launch.signals import hear, unblock

DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    # Collectives start in the order in which they were queued, before the products that hide them.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Of a rank's environment."""


def start_torchrun(run_dir: Path, ranks: int, arguments: list[str]) -> int:
    """Runs `mixtron.launch.train` on `ranks` local ranks; returns the run's exit code.

    Signals that end a job are passed on. torchrun returns 1 whatever its workers returned, so the
    code is read from the run folder; none there means that a rank was killed.
    """
    launch = uuid.uuid4().hex
    command = _torchrun(ranks, "mixtron.launch.train", arguments)
    environment = {**DEFAULTS, **os.environ, exit_codes.LAUNCH_VARIABLE: launch}

    def begin() -> None:
        unblock()
        # torchrun passes the signal on, so that ranks whose launcher died save and stop.
        die_with_parent(signal.SIGTERM)

    process = subprocess.Popen(command, env=environment, preexec_fn=begin)
    hear(lambda received, frame: process.send_signal(received))
    process.wait()
    return exit_codes.read_exit_file(run_dir, launch)


def repeat_on_ranks(ranks: int) -> int:
    """Runs this very command on `ranks` local ranks; 0, or FAILED where one of them said why."""
    environment = {**DEFAULTS, **os.environ}
    process = subprocess.run(
        _torchrun(ranks, "mixtron.launch.cli", sys.argv[1:]),
        env=environment,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )
    return exit_codes.FAILED if process.returncode else exit_codes.FINISHED


def _torchrun(ranks: int, module: str, arguments: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"),
        *("-m", module, *arguments),
    ]
