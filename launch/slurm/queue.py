"""SLURM's own commands: submitting, asking, cancelling. No state is kept here."""

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMMENT = "mixtron "
"""Begins the comment of a run's jobs; the run folder follows."""
_FORMAT = "%i|%T|%r|%N|%L|%k"


class SlurmError(Exception):
    """SLURM refused, or is not here."""

    exit_code = 2


@dataclass(frozen=True)
class QueuedJob:
    """A job that SLURM still holds."""

    job: str
    """`123`, or `123_4` of an array."""
    state: str
    reason: str
    nodes: str
    time_left: str
    comment: str


def call(*command: str) -> str:
    """A SLURM command's output.

    Raises:
        SlurmError: it is not installed, or failed; says what it said.
    """
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on this machine; run this where SLURM's commands are, "
            "or `mixtron train` without SLURM"
        ) from None
    if answer.returncode != 0:
        said = " ".join((answer.stderr or answer.stdout).split())
        raise SlurmError(f"{command[0]}: {said or f'exit code {answer.returncode}'}")
    return answer.stdout


def sbatch(script: Path, *options: str, arguments: Sequence[str] = ()) -> str:
    """Submits; returns the job's id."""
    answer = call("sbatch", "--parsable", *options, str(script), *arguments)
    return answer.strip().split(";")[0]


def queued_jobs() -> list[QueuedJob]:
    """This user's jobs that wait or run."""
    lines = call("squeue", "--me", "-h", "-r", "-o", _FORMAT).splitlines()
    return [QueuedJob(*line.strip().split("|", 5)) for line in lines if line.strip()]


def ended_state(job: str) -> str:
    """State of a job that is no longer queued, as far as SLURM remembers; else empty."""
    with contextlib.suppress(SlurmError):
        for word in call("scontrol", "-o", "show", "job", job).split():
            if word.startswith("JobState="):
                return word.removeprefix("JobState=")
    if shutil.which("sacct"):
        with contextlib.suppress(SlurmError):
            return call("sacct", "-n", "-X", "-P", "-o", "State", "-j", job).split("\n")[0].strip()
    return ""


def partition_limit(partition: str | None) -> str:
    """A partition's time limit as sinfo prints it; empty where it does not answer."""
    with contextlib.suppress(SlurmError):
        which = ["-p", partition] if partition else []
        for line in call("sinfo", "-h", *which, "-o", "%P|%l").splitlines():
            name, _, limit = line.strip().partition("|")
            if partition or name.endswith("*"):
                return limit
    return ""


def seconds_of(limit: str) -> float:
    """`2-03:00:00`, `03:00:00`, `30:00`, `infinite` in seconds."""
    if not limit or not limit[0].isdigit():
        return float("inf")
    days, dash, clock = limit.partition("-")
    if not dash:
        days, clock = "0", limit
    parts = [int(part) for part in clock.split(":")]
    if dash:
        parts += [0] * (3 - len(parts))
    seconds = 0
    for part in parts if len(parts) > 1 else [parts[0], 0]:
        seconds = 60 * seconds + part
    return int(days) * 86400 + seconds
