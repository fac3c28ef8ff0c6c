"""Watches one task's ranks: passes signals on, notices hangs, and says how they ended."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from mixtron.launch import exit_codes
from mixtron.launch.heartbeat import STOP_FILE, read_beats
from mixtron.launch.lifetime import die_with_parent
from mixtron.launch.signals import STOP_SIGNALS, hear
from mixtron.launch.slurm.hangs import HangWatch
from mixtron.launch.slurm.task import Task

POLL_S = 1.0


class Supervisor:
    """Of the ranks that this task starts.

    Args:
        logs: this launch's folder in the run folder, shared by all tasks.
        heartbeats: this task's folder on the node.
    """

    def __init__(self, logs: Path, heartbeats: Path):
        self.logs, self.heartbeats = logs, heartbeats
        hear(self._stop_ranks)

    def _stop_ranks(self, number: int, frame) -> None:
        # In this order: a rank that is not listed yet will see the file.
        (self.heartbeats / STOP_FILE).touch()
        for beat in read_beats(self.heartbeats):
            send(beat.pid, signal.SIGUSR1)

    def run(
        self, task: Task, command: list[str], environment: dict[str, str], run_dir: Path
    ) -> int:
        """Runs the ranks to their end; returns this task's exit code.

        A run that was saved and stopped is 0 here: srun kills the other tasks, which may not be
        through with it, as soon as one fails. The run folder's exit.json has the run's code.
        """
        process = subprocess.Popen(command, env=environment, preexec_fn=_prepare_child)
        watch = HangWatch(task, self.logs, self.heartbeats)
        while process.poll() is None:
            if watch.hang_found():
                process.kill()
                process.wait()
                return exit_codes.RETRYABLE
            time.sleep(POLL_S)
        return _exit_code(task, process.returncode, run_dir)


def _exit_code(task: Task, returncode: int, run_dir: Path) -> int:
    if returncode in (exit_codes.FINISHED, exit_codes.PREEMPTED):
        return 0
    if returncode < 0:
        name = signal.Signals(-returncode).name
        print(
            f"mixtron: task {task.task} on {task.node} was killed by {name}",
            flush=True,
        )
        return exit_codes.RETRYABLE
    # torchrun's own code says nothing.
    code = exit_codes.read_exit_file(run_dir, task.launch)
    return 0 if code == exit_codes.PREEMPTED else code


def _prepare_child() -> None:
    die_with_parent(signal.SIGKILL)
    # Ranks set their own handlers; until then, and in torchrun, a signal must not kill.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
