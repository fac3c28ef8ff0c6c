"""One progress bar for the long jobs: bytes done, documents a second, time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REFRESH_SECONDS = 0.1


@contextmanager
def progress_bar(
    name: str, total_bytes: int, *, show: bool
) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error; yields `advance(bytes, documents)`."""
    if not show:
        yield lambda size, count: None
        return
    # Here, because every worker imports this file and none shows a bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[documents]:,} documents, {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
    )
    # Drawn when it advances, not by a thread: a process without threads may fork its workers.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(name, total=total_bytes, documents=0, rate=0.0)
        documents, drawn = 0, 0.0

        def advance(size: int, count: int) -> None:
            nonlocal documents, drawn
            documents += count
            rate = documents / max(bar.tasks[0].elapsed or 0.0, 1e-3)
            due = (now := time.monotonic()) - drawn >= REFRESH_SECONDS
            drawn = now if due else drawn
            bar.update(task, advance=size, documents=documents, rate=rate, refresh=due)

        yield advance
