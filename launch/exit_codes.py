"""How a run ends, the same everywhere, and how the launcher learns of it."""

import json
import os
from pathlib import Path

from mixtron.launch.whole_files import replaced

FINISHED = 0
FAILED = 1
"""An exception that a restart would meet again."""
BAD_INPUT = 2
"""Usage, config or data: never requeue."""
PREEMPTED = 75
"""Stopped by a signal and saved: requeue."""
RETRYABLE = 76
"""NCCL or gloo, CUDA, I/O, a hang, a killed rank: a restart may cure it."""
LAUNCH_VARIABLE = "MIXTRON_LAUNCH"
"""Environment variable that tells the ranks of one launch from those of another."""


def exit_code_of(error: BaseException) -> int:
    """The exit code an exception stands for."""
    code = getattr(error, "exit_code", None)
    if code is not None:
        return code
    import torch  # seconds, which a mistake in a config must not cost

    if isinstance(error, torch.OutOfMemoryError):
        return FAILED
    text = str(error)
    broken_link = isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "NCCL", "CUDA error", "Connection closed", "timed out")
    )
    if isinstance(error, OSError | torch.distributed.DistError) or broken_link:
        return RETRYABLE
    return FAILED


def write_exit_file(run_dir: Path, code: int) -> None:
    """Tells the launcher how the run ended: torchrun returns 1 whatever its workers returned."""
    content = {"exit_code": code, "launch": os.environ.get(LAUNCH_VARIABLE, "")}
    with replaced(run_dir / "exit.json") as file:
        file.write_text(json.dumps(content) + "\n")


def read_exit_file(run_dir: Path, launch: str) -> int:
    """The code that the workers of this launch left, or RETRYABLE when they left none."""
    try:
        content = json.loads((run_dir / "exit.json").read_text())
        return int(content["exit_code"]) if content["launch"] == launch else RETRYABLE
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return RETRYABLE
