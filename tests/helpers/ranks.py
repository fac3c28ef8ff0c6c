"""Runs functions on several ranks (CPU, gloo) forked from one that has imported everything."""

import atexit
import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

MAX_WORLD_SIZE = 4
CALLS_A_PROCESS = 24
"""A gloo world leaves idle threads behind; fresh processes have none and cost little."""
GRACE_S = 2.0
"""How long the other ranks of a failed call may go on: to fail as well, and say why."""


class RankFailure(Exception):
    """A rank raised, died or ran out of time; the message holds every failed rank's traceback."""


def run_on_ranks(world_size: int, function: Callable, *args, timeout_s: float = 120.0) -> list:
    """Calls `function(*args)` in every rank of a new gloo world; returns the results by rank.

    Args:
        function: importable by name; arguments and results are pickled.
    Raises:
        RankFailure: the call failed on a rank. The processes are replaced, so nothing hangs and the
            next call starts clean.
    """
    return _pool().run(world_size, function, args, timeout_s)


def renew_ranks() -> None:
    """The next call finds new processes. The threads of the process groups that a call leaves
    behind go on, and many of them take the processor from all others."""
    _pool().renew()


@cache
def _pool() -> "RankPool":
    pool = RankPool()
    atexit.register(pool.close)
    return pool


class RankPool:
    """A server that has imported everything and the rank processes forked from it."""

    def __init__(self, size: int = MAX_WORLD_SIZE):
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        address = str(self.folder / "socket")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen()
        self.listener.settimeout(1.0)
        # One thread: two cores are shared by four ranks, and sums come out the same every time.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        self.server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.helpers.rank_server", address],
            cwd=root,
            env=environment,
        )
        self.control = self._accept()
        self.calls = 0
        self.ranks: list[Connection] = []
        self.processes: list[int] = []
        self._fork()

    def run(self, world_size: int, function: Callable, args: tuple, timeout_s: float) -> list:
        assert 1 <= world_size <= self.size, f"a world of {world_size} of {self.size} ranks"
        if self.calls and self.calls % CALLS_A_PROCESS == 0:
            self.renew()
        self.calls += 1
        call = pickle.dumps((function, args))
        for rank, connection in enumerate(self.ranks[:world_size]):
            store = str(self.folder / f"store-{self.calls}")
            with contextlib.suppress(OSError):  # a dead rank is noticed when its answer is read
                connection.send((world_size, store, str(self._stack(rank)), timeout_s, call))
        outcomes, reason = self._collect(self.ranks[:world_size], timeout_s)
        if reason is None:
            return [outcomes[rank][1] for rank in range(world_size)]
        message = "\n".join([reason, *self._describe(world_size, outcomes)])
        self.renew()
        raise RankFailure(message)

    def renew(self) -> None:
        self._kill()
        self._fork()

    def close(self) -> None:
        """Ends the server and the ranks. They also end by themselves when this process dies."""
        self._kill()
        self.control.close()
        self.server.wait(timeout=60)
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _collect(self, ranks: list[Connection], timeout_s: float) -> tuple[dict, str | None]:
        """Outcomes by rank, and why the call failed (None: it did not)."""
        # More than a late rank needs to write down where it stands and to end itself.
        deadline = time.monotonic() + timeout_s + GRACE_S
        outcomes: dict[int, tuple[bool, object]] = {}
        reason = None
        while len(outcomes) < len(ranks):
            pending = [c for rank, c in enumerate(ranks) if rank not in outcomes]
            ready = wait(pending, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                return outcomes, reason or f"no answer within {timeout_s} s"
            for connection in ready:
                rank = ranks.index(connection)  # type: ignore[arg-type]
                try:
                    outcomes[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = (False, None)
                if not outcomes[rank][0] and reason is None:
                    reason = f"rank {rank} failed"
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes, reason

    def _describe(self, world_size: int, outcomes: dict) -> list[str]:
        lines = []
        for rank in range(world_size):
            succeeded, value = outcomes.get(rank, (False, None))
            if not succeeded:
                stack = self._stack(rank).read_text()
                what = value or f"died or was still running\n{stack}"
                lines.append(f"--- rank {rank}: {what}")
        return lines

    def _stack(self, rank: int) -> Path:
        """Where a rank that runs out of time writes its stack."""
        return self.folder / f"stack-{rank}"

    def _accept(self) -> Connection:
        """The next connection, unless the server dies before."""
        while True:
            try:
                connected = self.listener.accept()[0]
                connected.setblocking(True)
                return Connection(connected.detach())
            except TimeoutError:
                if self.server.poll() is not None:
                    raise RankFailure(f"rank server ended with {self.server.returncode}") from None

    def _fork(self) -> None:
        for rank in range(self.size):
            self.control.send(rank)
        arrived = {}
        for _ in range(self.size):
            connection = self._accept()
            rank, process = connection.recv()
            arrived[rank] = (connection, process)
        self.ranks = [arrived[rank][0] for rank in range(self.size)]
        self.processes = [arrived[rank][1] for rank in range(self.size)]

    def _kill(self) -> None:
        for connection, process in zip(self.ranks, self.processes, strict=True):
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, 9)
        self.ranks, self.processes = [], []
