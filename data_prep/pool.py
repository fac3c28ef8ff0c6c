"""Processes that do units: given one at a time, they answer with progress and receipts."""

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from mixtron.data_prep.errors import WorkerError
from mixtron.data_prep.plan import Plan, Unit
from mixtron.data_prep.tokenizer_base import Tokenizer
from mixtron.data_prep.unit import Advance, Encoder, run_unit

SAFE_THREADS = {"jemalloc_bg_thd"}
"""Comes with pyarrow; jemalloc itself readies its threads and locks for a fork (pthread_atfork)."""


def do_units(
    plan: Plan,
    units: list[Unit],
    folder: Path,
    workers: int,
    backend: str,
    advance: Advance,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Does units, each by one of `workers` processes; with one worker, in this process.

    The arguments are those of `run_units`.

    Raises:
        DataError: the first that a worker meets, at once; the others are ended.
        WorkerError: a worker process died.
    """
    if not units:
        return
    # One worker a core: threads of libraries would only get in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if workers > 1:
        workers = min(workers, len(units))
        _do_in_processes(plan, units, folder, workers, backend, advance, tokenizer)
        return
    encoder = Encoder(plan, backend, tokenizer)
    for unit in units:
        run_unit(unit, folder, plan, encoder, advance)


def _do_in_processes(
    plan: Plan,
    units: list[Unit],
    folder: Path,
    workers: int,
    backend: str,
    advance: Advance,
    tokenizer: Tokenizer | None,
) -> None:
    waiting = list(reversed(units))
    pipes = [multiprocessing.Pipe() for _ in range(workers)]
    connections, theirs = [ours for ours, _ in pipes], [end for _, end in pipes]
    foreman = _start_foreman(connections, (theirs, plan, folder, backend), tokenizer)
    for end in theirs:
        end.close()
    try:
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
    except BaseException:
        _kill(foreman)
        foreman.join()
        raise
    finally:
        # This ends idle workers, and the foreman after them, which takes as long as to free their
        # memory: nobody waits for it.
        for connection in connections:
            connection.close()


def _start_foreman(
    connections: list[Connection], arguments: tuple, tokenizer: Tokenizer | None
) -> BaseProcess:
    """A fork of this process where that is safe, which then has all imports and the tokenizer."""
    if has_threads():  # one of which may hold a lock that a forked child would wait for
        context, inherited = multiprocessing.get_context("spawn"), (None, [])
    else:
        context, inherited = multiprocessing.get_context("fork"), (tokenizer, connections)
    foreman = context.Process(target=_lead, args=(*arguments, *inherited), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python counts the safe threads, too
        foreman.start()
    return foreman


def has_threads() -> bool:
    """Whether this process has threads, of Python or of any library, that a fork would lose."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return sum(name not in SAFE_THREADS for name in names) > 1


def _kill(foreman: BaseProcess) -> None:
    """Ends the foreman and its workers."""
    assert foreman.pid is not None
    try:
        os.killpg(foreman.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not begun, or has ended
        foreman.kill()


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


def _lead(
    connections: list[Connection],
    plan: Plan,
    folder: Path,
    backend: str,
    tokenizer: Tokenizer | None,
    inherited: list[Connection],
) -> None:
    """Imports and loads what workers need, once; forks them; waits for them.

    It has neither tokenised in parallel nor started threads: its forks are safe.
    """
    os.setpgid(0, 0)
    # The parent alone answers signals; workers end with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    for connection in inherited:
        connection.close()
    try:
        encoder = Encoder(plan, backend, tokenizer)
    except Exception as error:
        for connection in connections:
            connection.send(error)
        return
    if any(file.format in ("parquet", "arrow", "arrow_stream") for file in plan.inputs):
        from mixtron.data_prep import tables  # noqa: F401
    for connection in connections:
        if os.fork() == 0:
            for other in connections:
                if other is not connection:
                    other.close()
            _work(connection, plan, folder, encoder)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()


def _work(connection: Connection, plan: Plan, folder: Path, encoder: Encoder) -> NoReturn:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        while True:
            unit = connection.recv()
            send = lambda *passed: connection.send(passed)  # noqa: E731
            connection.send(run_unit(unit, folder, plan, encoder, send))
    except EOFError:
        pass
    except Exception as error:
        connection.send(error)
    finally:
        os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
