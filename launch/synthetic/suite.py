"""`mixtron eval synthetic suite`: trains a suite's models, a process each where there is room."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from mixtron.launch import exit_codes
from mixtron.launch.lifetime import die_with_parent
from mixtron.launch.memory import memory_per_rank
from mixtron.launch.synthetic.suite_config import Cell, cells_of, load_suite
from mixtron.launch.synthetic.suite_results import has_result, read_results
from mixtron.launch.synthetic.suite_table import write_table

PROCESS_BYTES = 1 << 30
"""Of GPU memory: CUDA's context, and what the allocator holds without using it."""


def run_suite(path: Path, folder: Path | None, *, tiny: bool, workers: int | None) -> int:
    """Runs what has no result yet, then writes the table of all; returns the exit code.

    The same command continues after a kill. Several may run at once, on several machines too: each
    takes runs that no other holds.

    Args:
        folder: default runs/suites/NAME, or NAME_tiny.
        workers: None takes as many as the machine has CPU cores and GPU memory for.
    Raises:
        ConfigError: the suite cannot be run, or the folder holds results of another one.
    """
    suite = load_suite(path, tiny=tiny)
    folder = folder or Path("runs/suites") / (f"{suite.name}_tiny" if tiny else suite.name)
    cells = cells_of(suite, folder)
    console = Console(highlight=False, soft_wrap=True)
    to_do = [cell for cell in cells if not has_result(cell, suite)]
    console.print(f"{suite.name}: {len(cells)} runs, {len(cells) - len(to_do)} done, in {folder}")
    code = exit_codes.FINISHED
    if to_do:
        count = min(workers or room_for(to_do), len(to_do))
        arguments = [str(path), "--dir", str(folder), *(["--tiny"] if tiny else [])]
        code = run_workers(arguments, count)
    results = read_results(cells, suite)
    if results:
        for file in write_table(suite, results, folder):
            console.print(f"written: {file}", markup=False)
        console.print((folder / "table.md").read_text(), markup=False)
    console.print(f"{len(results)} of {len(cells)} runs have results")
    return code


def room_for(cells: list[Cell]) -> int:
    """How many of the largest of these models fit beside each other, at least 1."""
    import torch

    cores = len(os.sched_getaffinity(0))

    if not torch.cuda.is_available():
        return cores
    largest = max(sum(memory_per_rank(cell.config, 1).values()) for cell in cells)
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(cores, int(0.8 * free / (largest + PROCESS_BYTES))))


def run_workers(arguments: list[str], count: int) -> int:
    """Starts `count` workers and waits; returns the first code that is not 0.

    A signal to stop goes to all of them; they save and end.
    """
    command = [sys.executable, "-m", "mixtron.launch.synthetic.suite_worker", *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    workers = [
        subprocess.Popen(
            command,
            env=environment,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        for _ in range(count)
    ]

    def pass_on(number: int, frame) -> None:
        for worker in workers:
            worker.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        codes = [worker.wait() for worker in workers]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for worker in workers:
            worker.terminate()
    # A worker that a signal killed has a negative code.
    return next((c if c > 0 else exit_codes.RETRYABLE for c in codes if c), exit_codes.FINISHED)
