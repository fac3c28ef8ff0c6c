"""Files that are replaced whole: a reader, or a run after a kill, finds the old one or the new."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a path beside `path`, of the same suffix; what was written there takes its place.

    Where writing fails, `path` stays as it was.
    """
    temporary = path.with_name(f".{os.getpid()}.tmp.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
