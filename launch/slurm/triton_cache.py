"""Triton's compiled kernels: on each node's own disk, and once in the run folder.

Ranks of one node share a folder. Before they start, their node takes what earlier launches
compiled from the run folder; so a restart, or a new node, compiles nothing again.
"""

import fcntl
import os
import tarfile
from pathlib import Path

from mixtron.launch.whole_files import replaced

ARCHIVE = Path("slurm") / "triton_cache.tar"


def unpack(run_dir: Path) -> None:
    """Fills this node's cache, once, whichever of the node's jobs comes first."""
    folder, archive = cache_folder(), run_dir / ARCHIVE
    folder.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        return
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = folder / f".unpacked_{archive.stat().st_mtime_ns}"
        if mark.exists():
            return
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        mark.touch()


def pack(run_dir: Path) -> None:
    """Keeps this node's kernels in the run folder, if there are any and none are kept yet."""
    folder, archive = cache_folder(), run_dir / ARCHIVE
    kernels = [p for p in folder.iterdir() if not p.name.startswith(".")]
    if archive.exists() or not kernels:
        return
    with replaced(archive) as file, tarfile.open(file, "w") as tar:
        for path in kernels:
            tar.add(path, arcname=path.name)


def cache_folder() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"])
