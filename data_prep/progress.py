"""One progress bar for the long jobs: bytes done, documents a second, time left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total_bytes, documents=0, rate=0.0)
        documents = 0

        def advance(size: int, count: int) -> None:
            nonlocal documents
            documents += count
            rate = documents / max(bar.tasks[0].elapsed or 0.0, 1e-3)
            bar.update(task, advance=size, documents=documents, rate=rate)

        yield advance
