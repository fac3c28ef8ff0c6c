"""Reading shards: Megatron's `.bin` and `.idx` and our manifest, by memory map.

`.idx`, little endian: 9 bytes of magic, u64 version 1, u8 dtype code, u64 S sequences, u64 S + 1,
then i32 lengths [S] in tokens, i64 byte pointers [S] into `.bin`, i64 document indices 0..S
(one sequence a document). `.bin`: the tokens and nothing else.
"""

import bisect
import hashlib
import struct
from pathlib import Path

import numpy as np

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.manifest import Manifest, read_manifest

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPE_CODES = {"uint16": 8, "int32": 4}
"""Megatron's codes of the two types that are written; there is none for uint32."""
UINT16_CARDINALITY_LIMIT = 65500
"""Megatron's preprocessing bound: from this vocabulary on, tokens are int32."""


def shard_paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    """The `.bin`, `.idx` and `.json` of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), Path(f"{prefix}.json")


def token_dtype(cardinality: int) -> np.dtype:
    """The type of tokens below `cardinality`, the true one with added tokens.

    Raises:
        DataError: ids would not fit into int32.
    """
    if cardinality > 2**31:
        raise DataError(f"vocabulary of {cardinality} ids: the format holds ids below 2^31")
    return np.dtype(np.uint16 if cardinality < UINT16_CARDINALITY_LIMIT else np.int32)


class Shard:
    """One opened corpus. Costs no memory but the mapped pages that are read.

    Raises:
        DataError: a file is missing, truncated, or disagrees with the manifest.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        bin_path, idx_path, json_path = shard_paths(prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise DataError(f"{path}: no such file; give the shard's prefix, without .bin")
        self.manifest: Manifest = read_manifest(json_path)
        dtype, self.documents = read_header(idx_path)
        self._pointers_D = self._map_pointers(idx_path)
        self.total_tokens = self.manifest.tokens
        self._check(bin_path, idx_path, dtype)
        # A plain view: element access on np.memmap itself is ten times slower.
        self._tokens = np.asarray(np.memmap(bin_path, dtype=dtype, mode="r"))

    @property
    def fingerprint(self) -> str:
        """Of the content: the same after a move, another after any change."""
        hashes = self.manifest.bin_sha256 + self.manifest.idx_sha256
        return hashlib.sha256(hashes.encode()).hexdigest()

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """A copy [stop - start] int64 of that slice of the concatenated documents."""
        if not 0 <= start <= stop <= self.total_tokens:
            raise IndexError(f"{self.prefix}: tokens {start}:{stop} of {self.total_tokens}")
        return self._tokens[start:stop].astype(np.int64)

    def document(self, index: int) -> np.ndarray:
        """A copy [tokens] int64 of one document, with its end-of-document token."""
        if not 0 <= index < self.documents:
            raise DataError(f"{self.prefix}: document {index}: there are {self.documents}, from 0")
        start, stop = self.offsets_of(np.array([index, index + 1]))
        return self.tokens(int(start), int(stop))

    @property
    def document_offsets(self) -> np.ndarray:
        """int64 [documents + 1] token offsets, made anew on each call: 8 bytes a document."""
        return self.offsets_of(np.arange(self.documents + 1))

    def offsets_of(self, documents: np.ndarray) -> np.ndarray:
        """int64 token offsets at which these documents begin; `self.documents` gives the end."""
        inside = documents < self.documents
        offsets = np.full(len(documents), self.total_tokens, dtype=np.int64)
        offsets[inside] = self._pointers_D[documents[inside]] // self._tokens.itemsize
        return offsets

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """int64 token offsets in [start, stop) at which a document begins, ascending."""
        itemsize = self._tokens.itemsize
        # bisect touches a few pages; np.searchsorted would copy the unaligned map.
        first = bisect.bisect_left(self._pointers_D, start * itemsize)
        last = bisect.bisect_left(self._pointers_D, stop * itemsize, lo=first)
        return self._pointers_D[first:last] // itemsize

    def _map_pointers(self, idx_path: Path) -> np.ndarray:
        size, documents = idx_path.stat().st_size, self.documents
        expected = HEADER.size + 12 * documents + 8 * (documents + 1)
        if documents == 0 or size != expected:
            raise DataError(
                f"{idx_path}: {size} bytes, {expected} expected for {documents} documents: "
                "truncated or damaged; copy or build it again"
            )
        offset = HEADER.size + 4 * documents
        pointers = np.memmap(idx_path, dtype="<i8", mode="r", offset=offset, shape=(documents,))
        return np.asarray(pointers)

    def _check(self, bin_path: Path, idx_path: Path, dtype: np.dtype) -> None:
        manifest = self.manifest
        lengths = np.memmap(idx_path, "<i4", "r", HEADER.size, shape=(self.documents,))
        indexed_bytes = int(self._pointers_D[-1]) + int(lengths[-1]) * dtype.itemsize
        bin_bytes = bin_path.stat().st_size
        if bin_bytes != indexed_bytes:
            raise DataError(
                f"{bin_path}: {bin_bytes} bytes, its index says {indexed_bytes}: truncated or "
                "damaged; copy or build it again"
            )
        found = {
            "dtype": dtype.name,
            "documents": self.documents,
            "tokens": bin_bytes // dtype.itemsize,
        }
        for key, value in found.items():
            if getattr(manifest, key) != value:
                raise DataError(
                    f"{self.prefix}.json: {key} {getattr(manifest, key)}, but the .bin and .idx "
                    f"hold {value}: the files are not of one build"
                )


def read_header(idx_path: Path) -> tuple[np.dtype, int]:
    """The token type and the number of documents."""
    with open(idx_path, "rb") as f:
        header = f.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{idx_path}: not a Megatron index (it does not begin with MMIDIDX)")
    _, version, code, sequences, document_indices = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{idx_path}: index version {version}, only {VERSION} is known")
    names = [name for name, known in DTYPE_CODES.items() if known == code]
    if not names:
        raise DataError(f"{idx_path}: token type code {code}; uint16 (8) and int32 (4) are read")
    if document_indices != sequences + 1:
        raise DataError(
            f"{idx_path}: {sequences} sequences in {document_indices - 1} documents; only one "
            "sequence a document is read"
        )
    return np.dtype(names[0]), sequences
