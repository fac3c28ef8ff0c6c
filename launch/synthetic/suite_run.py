"""What one process of a suite does: takes runs that no other holds, trains and evaluates them."""

import contextlib
import fcntl
import sys
import time
import traceback
from collections.abc import Iterator

from mixtron.launch import exit_codes
from mixtron.launch.data import open_data
from mixtron.launch.lifetime import unlock_run_folder
from mixtron.launch.loop import Run, train
from mixtron.launch.setup_run import prepare
from mixtron.launch.signals import StopFlag, Stopped
from mixtron.launch.synthetic.accuracy import evaluate_settings
from mixtron.launch.synthetic.suite_config import Cell, SuiteConfig
from mixtron.launch.synthetic.suite_results import has_result, write_result

EVALUATION_SEED = 1


class Worker:
    """Runs every cell that is neither done nor held by another process."""

    def __init__(self, suite: SuiteConfig, cells: list[Cell]) -> None:
        self.suite, self.cells = suite, cells
        self.stop = StopFlag()

    def work(self) -> int:
        """Returns the exit code. A run that fails is reported, and the others go on."""
        code = exit_codes.FINISHED
        for number, cell in enumerate(self.cells, start=1):
            with held(cell) as mine:
                if not mine or has_result(cell, self.suite):
                    continue
                started = time.perf_counter()
                try:
                    rows = self.run_cell(cell)
                except Stopped:
                    return exit_codes.PREEMPTED
                except Exception as error:
                    code = exit_codes.exit_code_of(error)
                    print(f"mixtron: {cell.label}: {error}", file=sys.stderr, flush=True)
                    if code == exit_codes.FAILED:
                        traceback.print_exc()
                    continue
                if rows is None:
                    return exit_codes.PREEMPTED
                seconds = time.perf_counter() - started
                write_result(cell, self.suite, rows, seconds)
                said = ", ".join(f"{row['accuracy']:.1%}" for row in rows)
                place = f"[{number}/{len(self.cells)}]"
                print(f"{place} {cell.label}: {said} ({seconds:.0f} s)", flush=True)
        return code

    def run_cell(self, cell: Cell) -> list[dict] | None:
        """Trains through the ordinary loop, or resumes, and evaluates; None when told to stop.

        What the loop says goes to log.txt in the run's folder.
        """
        with open(cell.run_dir / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            try:
                run = prepare(cell.config, *open_data(cell.config)[1:], self.stop)
                if train(run, self.stop) != exit_codes.FINISHED:
                    return None
                return self.evaluate(cell, run)
            finally:
                unlock_run_folder()

    def evaluate(self, cell: Cell, run: Run) -> list[dict] | None:
        rows = []
        for setting in cell.settings:
            if self.stop.requested():
                return None
            rows += evaluate_settings(
                run.wrapped[0],
                cell.config.model,
                run.ranks,
                [setting],
                sequences=self.suite.sequences,
                seed=EVALUATION_SEED,
            )
        return rows


@contextlib.contextmanager
def held(cell: Cell) -> Iterator[bool]:
    """Whether this process has the run to itself; a process that dies lets go of it."""
    cell.run_dir.mkdir(parents=True, exist_ok=True)
    with open(cell.run_dir / "claim", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
