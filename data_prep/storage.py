"""Input files wherever they are: local paths and fsspec URLs."""

import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mixtron.data_prep.errors import DataError

SAVED_DATASET = ("state.json", "dataset_info.json")
"""What Hugging Face's `Dataset.save_to_disk` writes beside its Arrow files."""


def is_url(name: str) -> bool:
    return "://" in name


@contextmanager
def open_input(name: str) -> Iterator[IO[bytes]]:
    """A file opened for reading; seekable where its file system is."""
    if is_url(name):
        system, path = _file_system(name)  # some close their files when they are forgotten
        with system.open(path, "rb") as f:
            yield f
    else:
        with open(name, "rb") as f:
            yield f


def size_and_state(name: str) -> tuple[int, str]:
    """Bytes, and a mark that changes whenever the file does: its ETag or time of change."""
    if not is_url(name):
        status = os.stat(name)
        return status.st_size, str(status.st_mtime_ns)
    system, path = _file_system(name)
    info = system.info(path)
    marks = (info.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "last_modified"))
    mark = next((str(value) for value in marks if value is not None), "")
    if info.get("size") is None:
        raise DataError(f"{name}: the server does not tell its size; download it first")
    return int(info["size"]), mark


def find_files(patterns: list[str]) -> list[str]:
    """The files behind paths, folders, globs and URLs: sorted, each once.

    A folder stands for every file below it whose name and folders do not begin with a dot; a
    dataset that `datasets` saved to disk, for its Arrow files.

    Raises:
        DataError: a pattern that matches nothing, or a file matched twice.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        matches = _expand_url(pattern) if is_url(pattern) else _expand(pattern)
        if not matches:
            raise DataError(f"{pattern}: 0 files matched")
        for file in matches:
            real = file if is_url(file) else os.path.realpath(file)
            if real in found:
                raise DataError(f"{file}: given twice (also as {found[real]})")
            found[real] = file
    return sorted(found.values())


def _expand(pattern: str) -> list[str]:
    if os.path.isdir(pattern):
        below = glob.glob(os.path.join(glob.escape(pattern), "**"), recursive=True)
        return _without_dataset_notes([p for p in below if os.path.isfile(p)])
    if os.path.isfile(pattern):
        return [pattern]
    return [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]


def _without_dataset_notes(files: list[str]) -> list[str]:
    """Of datasets saved to disk, the Arrow files that they name and nothing else."""
    names = set(files)
    for file in files:
        if Path(file).name == "dataset_dict.json":
            splits = json.loads(Path(file).read_bytes()).get("splits", [])
            raise DataError(
                f"{Path(file).parent}: a dataset of several splits; give the folder of one of "
                f"them ({', '.join(splits)})"
            )
        if Path(file).name == SAVED_DATASET[0]:
            folder = Path(file).parent
            if (notes := str(folder / SAVED_DATASET[1])) in names:
                listed = json.loads(Path(file).read_bytes()).get("_data_files", [])
                data = {str(folder / entry["filename"]) for entry in listed}
                if missing := data - names:
                    raise DataError(f"{min(missing)}: named in {file}, but not there")
                names -= {p for p in names if Path(p).parent == folder} - data
                names -= {file, notes}
    return sorted(names)


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{url}: {error}") from None


def _expand_url(url: str) -> list[str]:
    if "::" in url:  # a chain of file systems names one file
        return [url]
    system, path = _file_system(url)
    if system.isdir(path):
        below = system.find(path)
        inside = [p for p in below if not _is_hidden(p.removeprefix(path.rstrip("/")))]
        return [system.unstrip_protocol(p) for p in inside]
    if any(mark in path for mark in "*?["):
        seen = [p for p in system.glob(path) if not Path(p).name.startswith(".")]
        matches = [p for p in seen if system.isfile(p)]
        return [system.unstrip_protocol(p) for p in matches]
    return [url] if system.isfile(path) else []


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))
