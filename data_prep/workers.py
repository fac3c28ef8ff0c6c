"""Processes that read, parse and tokenise units of the input."""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice

import numpy as np

from mixtron.data_prep.readers import LineRange, Rejected, Unit, read_unit
from mixtron.data_prep.tokenizer import Tokenizer, load_tokenizer

UNITS_IN_FLIGHT = 3
"""Per worker: enough that none waits for the parent, few enough that memory stays flat."""


class WorkerError(Exception):
    """A worker process ended by itself: killed, out of memory, or crashed."""

    exit_code = 76


@dataclass(frozen=True)
class Options:
    """What a worker needs to know."""

    tokenizer: str
    eod_token: str | None
    text_keys: tuple[str, ...]
    append_eod: bool


@dataclass
class Encoded:
    """A worker's result for one unit."""

    tokens: np.ndarray
    """Documents one after another, int32."""
    lengths: np.ndarray
    """int64 [documents], tokens of each."""
    empty: int
    rejected: list[Rejected]
    lines: int
    input_bytes: int
    files: list[dict]
    """`file`, `bytes`, `sha256` of the text files that the unit read whole."""


class Workers:
    """A pool of tokenising processes; use as a context manager.

    Raises:
        WorkerError: from the context, when one of them died.
    """

    def __init__(self, count: int, options: Options) -> None:
        self._in_flight = UNITS_IN_FLIGHT * count
        # spawn: a forked child of a process that has tokenised may hang in its first batch.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, context, _start_worker, (options,))
        self._hashes: list[Future[dict]] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if kind is BrokenProcessPool:
            raise WorkerError(
                "a tokenising worker died (killed, or out of memory); nothing was published"
            ) from None

    def encode(self, units: Iterator[Unit]) -> Iterator[tuple[Unit, Encoded]]:
        """Each unit's result, in the order of `units`; few are in flight at any time."""
        pending: deque[tuple[Unit, Future[Encoded]]] = deque()
        for unit in islice(units, self._in_flight):
            pending.append((unit, self._submit(unit)))
        while pending:
            unit, future = pending.popleft()
            encoded = future.result()
            for following in islice(units, 1):
                pending.append((following, self._submit(following)))
            yield unit, encoded

    def line_file_hashes(self) -> list[dict]:
        """`file`, `bytes`, `sha256` of every JSONL file encoded so far."""
        return [future.result() for future in self._hashes]

    def _submit(self, unit: Unit) -> Future[Encoded]:
        if isinstance(unit, LineRange) and unit.start == 0:
            self._hashes.append(self._pool.submit(_hash_file, unit.file))
        return self._pool.submit(_work, unit)


_state: dict = {}
"""A worker's own tokenizer and options, set when it starts."""


def _start_worker(options: Options) -> None:
    # The parent alone answers an interrupt; workers end with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(options.tokenizer, options.eod_token)
    _state.update(tokenizer=tokenizer, options=options)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(unit: Unit) -> Encoded:
    return encode_unit(unit, _state["tokenizer"], _state["options"])


def _hash_file(file: str) -> dict:
    with open(file, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        return {"file": file, "bytes": f.tell(), "sha256": digest}


def encode_unit(unit: Unit, tokenizer: Tokenizer, options: Options) -> Encoded:
    """Reads, parses and tokenises one unit; documents of white space alone are dropped."""
    documents = read_unit(unit, options.text_keys)
    texts = [text for text in documents.texts if text and not text.isspace()]
    encoded = [ids for ids in tokenizer.encode_batch(texts) if len(ids)]
    if options.append_eod:
        encoded = [np.append(ids, tokenizer.eod_id) for ids in encoded]
    files = [
        {"file": file, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for file, content in documents.contents.items()
    ]
    return Encoded(
        tokens=np.concatenate(encoded, dtype=np.int32) if encoded else np.zeros(0, np.int32),
        lengths=np.array([len(ids) for ids in encoded], dtype=np.int64),
        empty=len(documents.texts) - len(encoded),
        rejected=documents.rejected,
        lines=documents.lines,
        input_bytes=documents.input_bytes,
        files=files,
    )
