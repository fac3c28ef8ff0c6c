"""Doing a plan's units: all of them, or one array element's share; what is done stays done."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mixtron.data_prep.errors import DataError, Stopped
from mixtron.data_prep.outputs import all_made
from mixtron.data_prep.plan import Plan, load_plan
from mixtron.data_prep.pool import do_units
from mixtron.data_prep.progress import progress_bar
from mixtron.data_prep.tokenizer_base import Tokenizer
from mixtron.data_prep.unit import Receipt, read_receipt

BACKENDS = ("plain", "gigatoken")


@dataclass(frozen=True)
class Share:
    """Element `index` of `count`: the units whose number leaves it as the rest."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise DataError(f"element {self.index} of {self.count}: count from 0 to below that")

    @classmethod
    def parse(cls, text: str) -> "Share":
        """From `INDEX/COUNT`."""
        try:
            index, count = map(int, text.split("/"))
        except ValueError:
            raise DataError(f"element {text!r}: INDEX/COUNT, as in 0/8") from None
        return cls(index, count)


def share_of_array(environment: Mapping[str, str] = os.environ) -> Share:
    """This task's share by SLURM_ARRAY_TASK_ID, _MIN, _STEP and _COUNT.

    Raises:
        DataError: not in an array, or its indices are not evenly spaced.
    """
    names = ("ID", "MIN", "COUNT")
    try:
        this, first, count = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in names)
        step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
    except (KeyError, ValueError):
        raise DataError(
            "--array: SLURM_ARRAY_TASK_ID, _MIN and _COUNT are not set; run it as an element of a "
            "SLURM array, or give --element INDEX/COUNT"
        ) from None
    index, rest = divmod(this - first, max(step, 1))
    if rest or index >= count:
        raise DataError(
            f"--array: index {this} in an array of {count} from {first}, step {step}: the indices "
            "must be evenly spaced; to repeat some elements, submit one index at a time or all"
        )
    return Share(index, count)


def parts_folder(prefix: str | Path) -> Path:
    return Path(f"{prefix}.parts")


def receipts_of(plan: Plan, prefix: str | Path) -> dict[str, Receipt]:
    """The receipts of finished units, by key."""
    folder = parts_folder(prefix)
    found = ((unit.key, read_receipt(folder, unit)) for unit in plan.units)
    return {key: receipt for key, receipt in found if receipt is not None}


def run_units(
    prefix: str | Path,
    workers: int = 1,
    share: Share | None = None,
    backend: str = "plain",
    progress: bool = True,
    tokenizer: Tokenizer | None = None,
) -> int:
    """Does the units of `PREFIX.plan.json` that have no receipt yet; returns how many it did.

    Args:
        workers: processes that tokenise.
        share: the part of the units to do; None does all.
        backend: `plain`, or `gigatoken`, which gives the same ids faster.
        tokenizer: that of the plan's recipe, where it is loaded already.

    Raises:
        DataError: bad input, with file and line; or too many bad lines.
        WorkerError: a worker process died.
        Stopped: SIGTERM or SIGUSR1 came.
    """
    if workers < 1:
        raise DataError(f"workers={workers}: at least 1")
    if backend not in BACKENDS:
        raise DataError(f"backend={backend!r}: {' or '.join(BACKENDS)}")
    plan, share = load_plan(prefix), share or Share()
    if all_made(plan, prefix):
        return 0
    folder = parts_folder(prefix)
    folder.mkdir(parents=True, exist_ok=True)
    mine = plan.units[share.index :: share.count]
    receipts = {unit.key: read_receipt(folder, unit) for unit in mine}
    left = [unit for unit in mine if receipts[unit.key] is None]
    rejected = sum(receipt.rejected for receipt in receipts.values() if receipt)
    with (
        _stop_on_signals(),
        progress_bar("tokenise", sum(unit.bytes for unit in mine), show=progress) as advance,
    ):

        def passed(input_bytes: int, documents: int, bad: int) -> None:
            nonlocal rejected
            rejected += bad
            advance(input_bytes, documents)
            refuse_too_many(rejected, plan)

        passed(sum(unit.bytes for unit in mine if receipts[unit.key]), 0, 0)
        do_units(plan, left, folder, workers, backend, passed, tokenizer)
    return len(left)


def refuse_too_many(rejected: int, plan: Plan) -> None:
    """Raises DataError when there are more bad lines than the recipe allows."""
    if rejected > plan.recipe.max_bad_lines:
        raise DataError(
            f"{rejected} bad lines or more, above max_bad_lines={plan.recipe.max_bad_lines}; mend "
            "the input, or raise it"
        )


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise `Stopped`; only a main thread may take signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        raise Stopped(f"stopped by {name}; finished units are kept: start the same command again")

    previous = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGUSR1)}
    # Whoever started this process may have blocked them, which processes inherit.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, previous)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
