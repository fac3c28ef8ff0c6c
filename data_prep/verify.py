"""Reading a whole shard again, to hold every claim of its manifest against its files."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mixtron.data_prep.background_digest import BackgroundDigest
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.manifest import Manifest
from mixtron.data_prep.progress import progress_bar
from mixtron.data_prep.shards import HEADER, Shard, read_header, shard_paths

BLOCK = 1 << 20
"""Documents, or 4 MiB of tokens, looked at together."""


@dataclass
class Contents:
    """What the files of a prefix hold, whatever a manifest says."""

    dtype: str
    documents: int
    tokens: int
    max_id: int
    longest_document: int
    ends: set[int]
    """Ids at the ends of documents: of each block the least and the largest."""
    begins: set[int]
    """Ids at the beginnings of documents, likewise."""
    bin_sha256: str
    idx_sha256: str


def verify(prefix: str | Path, progress: bool = True) -> Manifest:
    """Checks a shard in full: structure, ids, document ends, and both SHA-256.

    Raises:
        DataError: naming the file and what does not agree.
    """
    manifest = Shard(prefix).manifest
    bin_path, _, json_path = shard_paths(prefix)
    contents = read_contents(prefix, progress)
    for key in ("dtype", "documents", "tokens", "max_id", "longest_document"):
        if getattr(manifest, key) != (found := getattr(contents, key)):
            raise DataError(f"{json_path}: {key} {getattr(manifest, key)}, but the files: {found}")
    if contents.max_id >= manifest.cardinality:
        raise DataError(f"{bin_path}: id {contents.max_id} beyond the {manifest.cardinality} ids")
    for name, expected, found in (
        ("end", manifest.eod_id, contents.ends),
        ("begin", manifest.bos_id, contents.begins),
    ):
        if expected is not None and found != {expected}:
            raise DataError(f"{bin_path}: documents must {name} with id {expected}, not {found}")
    for suffix in ("bin", "idx"):
        key = f"{suffix}_sha256"
        if getattr(manifest, key) != getattr(contents, key):
            raise DataError(
                f"{prefix}.{suffix}: its SHA-256 is not the one in {json_path}: damaged or "
                "exchanged; copy or build it again"
            )
    return manifest


def read_contents(prefix: str | Path, progress: bool = True) -> Contents:
    """Reads both files in blocks, checking the index against itself and the tokens' size.

    Raises:
        DataError: naming the file and what does not agree.
    """
    bin_path, idx_path, _ = shard_paths(prefix)
    dtype, documents = read_header(idx_path)
    size = bin_path.stat().st_size
    with progress_bar("verify", size, show=progress) as advance:
        digest, max_id = BackgroundDigest(), -1
        with open(bin_path, "rb") as f:
            while block := f.read(4 * BLOCK):
                if len(block) % dtype.itemsize:
                    raise DataError(f"{bin_path}: {size} bytes are no whole number of tokens")
                digest.update(block)
                tokens = np.frombuffer(block, dtype=dtype)
                if tokens.min() < 0:
                    raise DataError(f"{bin_path}: a negative id, {tokens.min()}")
                max_id = max(max_id, int(tokens.max()))
                advance(len(block), 0)
        with open(idx_path, "rb") as f:
            idx_sha256 = hashlib.file_digest(f, "sha256").hexdigest()
        contents = Contents(
            dtype.name,
            documents,
            size // dtype.itemsize,
            max_id,
            *(0, set(), set()),
            digest.hexdigest(),
            idx_sha256,
        )
        _read_index(bin_path, idx_path, dtype, contents)
    return contents


def _read_index(bin_path: Path, idx_path: Path, dtype: np.dtype, contents: Contents) -> None:
    tokens = np.memmap(bin_path, dtype=dtype, mode="r")
    pointer = 0
    for first, lengths, pointers, indices in _index_blocks(idx_path, contents.documents):
        if lengths.min() < 0:
            raise DataError(f"{idx_path}: a document of length {lengths.min()}")
        stops = pointer + np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
        starts = stops - lengths * dtype.itemsize
        if not np.array_equal(starts, pointers):
            wrong = first + int(np.flatnonzero(starts != pointers)[0])
            raise DataError(f"{idx_path}: the pointer of document {wrong} is not where it begins")
        if not np.array_equal(indices, np.arange(first, first + len(indices))):
            raise DataError(f"{idx_path}: documents are not one sequence each, near {first}")
        pointer = int(stops[-1])
        if pointer > bin_path.stat().st_size:
            break
        real = lengths > 0
        ends, begins = stops[real] // dtype.itemsize - 1, starts[real] // dtype.itemsize
        contents.ends |= _least_and_largest(tokens[ends])
        contents.begins |= _least_and_largest(tokens[begins])
        contents.longest_document = max(contents.longest_document, int(lengths.max()))
    if pointer != bin_path.stat().st_size:
        raise DataError(
            f"{bin_path}: {bin_path.stat().st_size} bytes, its index says {pointer} or more"
        )


def _least_and_largest(ids: np.ndarray) -> set[int]:
    return {int(ids.min()), int(ids.max())} if len(ids) else set()


def _index_blocks(
    idx_path: Path, documents: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """First document, int64 lengths, pointers and document indices of each block."""
    with open(idx_path, "rb") as f:
        for first in range(0, documents, BLOCK):
            count = min(BLOCK, documents - first)
            last = first + count == documents
            arrays = []
            for offset, kind, n in (
                (4 * first, "<i4", count),
                (4 * documents + 8 * first, "<i8", count),
                (12 * documents + 8 * first, "<i8", count + last),
            ):
                f.seek(HEADER.size + offset)
                content = f.read(n * np.dtype(kind).itemsize)
                if len(content) < n * np.dtype(kind).itemsize:
                    raise DataError(f"{idx_path}: truncated")
                arrays.append(np.frombuffer(content, dtype=kind).astype(np.int64))
            yield first, *arrays
