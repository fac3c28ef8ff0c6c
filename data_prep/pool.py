"""Processes that do units: given one at a time, they answer with progress and receipts."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mixtron.data_prep.errors import WorkerError
from mixtron.data_prep.plan import Plan, Unit
from mixtron.data_prep.unit import Advance, Encoder, run_unit


def do_units(
    plan: Plan, units: list[Unit], folder: Path, workers: int, backend: str, advance: Advance
) -> None:
    """Does units, each by one of `workers` processes; with one worker, in this process.

    Raises:
        DataError: the first that a worker meets, at once; the others are ended.
        WorkerError: a worker process died.
    """
    if not units:
        return
    # One worker a core; a tokenizer's own threads would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if workers > 1:
        _do_in_processes(plan, units, folder, min(workers, len(units)), backend, advance)
        return
    encoder = Encoder(plan, backend)
    for unit in units:
        run_unit(unit, folder, plan, encoder, advance)


def _do_in_processes(
    plan: Plan, units: list[Unit], folder: Path, workers: int, backend: str, advance: Advance
) -> None:
    # spawn: a forked child of a process that has tokenised may hang in its first batch.
    context = multiprocessing.get_context("spawn")
    waiting, processes, connections = list(reversed(units)), [], []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            arguments = theirs, plan, folder, backend
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        busy = {connection for connection in connections if _give(connection, waiting)}
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                answer = _receive(connection)
                if isinstance(answer, BaseException):
                    raise answer
                if isinstance(answer, tuple):
                    advance(*answer)
                elif not _give(connection, waiting):
                    busy.discard(connection)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _give(connection: Connection, waiting: list[Unit]) -> bool:
    """Sends the next unit; False when there is none left."""
    if not waiting:
        return False
    try:
        connection.send(waiting.pop())
    except OSError:
        raise _died() from None
    return True


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        raise _died() from None


def _died() -> WorkerError:
    return WorkerError(
        "a tokenising worker died (killed, or out of memory); finished units are kept, and the "
        "same command continues"
    )


def _work(connection: Connection, plan: Plan, folder: Path, backend: str) -> None:
    # The parent alone answers signals; workers end with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        encoder = Encoder(plan, backend)
        while True:
            unit = connection.recv()
            send = lambda *passed: connection.send(passed)  # noqa: E731
            connection.send(run_unit(unit, folder, plan, encoder, send))
    except EOFError:
        return
    except Exception as error:
        connection.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
