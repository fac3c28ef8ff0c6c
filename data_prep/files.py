"""Files that appear whole or not at all: temporary name, flush to disk, rename."""

import contextlib
import glob
import os
import secrets
from collections.abc import Buffer
from pathlib import Path
from typing import IO


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


def remove_leftovers(path: Path) -> None:
    """Removes what interrupted writers of `path` left under temporary names."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.????????.tmp"):
        leftover.unlink(missing_ok=True)


def write_ahead(f: IO[bytes], content: Buffer) -> None:
    """Writes, and has the disk begin with it at once, so that `flush_to_disk` waits for little."""
    start = f.tell()
    f.write(content)
    # Linux starts to write pages out before it drops them; those on their way stay in memory.
    os.posix_fadvise(f.fileno(), start, 0, os.POSIX_FADV_DONTNEED)


def drop_from_memory(path: Path) -> None:
    """Frees what a flushed file takes of the system's memory, for what is written next.

    Memory that was free for long is slow to write to, the more so in a virtual machine.
    """
    with open(path, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flush_to_disk(f: IO) -> None:
    f.flush()
    os.fsync(f.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable, where the file system lets a folder be flushed."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Writes or replaces one small file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as f:
            f.write(content)
            flush_to_disk(f)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
