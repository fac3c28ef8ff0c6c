"""Writing shards: documents stream in, memory stays flat, files appear complete or not at all."""

import hashlib
import os
from pathlib import Path

import numpy as np

from mixtron.data_prep.background_digest import BackgroundDigest
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.files import flush_to_disk, sync_folder, temporary_name, write_ahead
from mixtron.data_prep.manifest import Manifest
from mixtron.data_prep.shards import DTYPE_CODES, HEADER, MAGIC, VERSION, shard_paths, token_dtype

BLOCK = 1 << 20
"""Documents whose index entries are in memory at once."""


class ShardWriter:
    """Writes one shard under temporary names; `publish` gives it its names, the manifest last.

    Use as a context manager: leaving it without `publish` removes what was written.

    Args:
        prefix: path without suffix; nothing may exist at its `.bin`, `.idx` or `.json`.
        cardinality: largest possible id plus 1, over the whole vocabulary with added tokens.
        eod_id: the id that ends every document, for the manifest; None if there is none.
        tokenizer: `type`, `sha256`, `vocab_size`, for the manifest.
        bos_id: the id that begins every document, for the manifest.
        special_text: see `Manifest`.

    Raises:
        DataError: the prefix is taken.
    """

    def __init__(
        self,
        prefix: str | Path,
        cardinality: int,
        eod_id: int | None,
        tokenizer: dict,
        bos_id: int | None = None,
        special_text: bool = False,
    ) -> None:
        self._paths = shard_paths(prefix)
        self._refuse_existing()
        self.dtype = token_dtype(cardinality)
        self.cardinality, self.eod_id, self.tokenizer = cardinality, eod_id, tokenizer
        self.bos_id, self.special_text = bos_id, special_text
        self.documents, self.tokens, self.max_id, self.longest_document = 0, 0, -1, 0
        self._bin_sha256 = BackgroundDigest()
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        self._temporaries = [temporary_name(path) for path in self._paths]
        self._bin = open(self._temporaries[0], "xb")  # noqa: SIM115
        self._idx = open(self._temporaries[1], "x+b")  # noqa: SIM115
        self._idx.write(bytes(HEADER.size))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._bin.close()
        self._idx.close()
        for path in self._temporaries:
            path.unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends documents.

        Args:
            tokens: [sum of lengths], integers: the documents one after another.
            lengths: [documents], integers above 0.

        Raises:
            DataError: an id outside the vocabulary, or a document too long for the format.
            ValueError: the lengths do not add up.
        """
        if len(lengths) == 0:
            return
        if lengths.sum() != len(tokens) or lengths.min() < 1:
            raise ValueError("lengths must be above 0 and add up to the tokens")
        if lengths.max() >= 2**31:
            raise DataError(f"{self._paths[0]}: a document of 2^31 tokens or more; split it")
        largest = int(tokens.max())
        if tokens.min() < 0 or largest >= self.cardinality:
            raise DataError(
                f"{self._paths[0]}: ids {tokens.min()} to {largest}, but the vocabulary has "
                f"{self.cardinality}"
            )
        data = np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<")).data
        write_ahead(self._bin, data)
        self._bin_sha256.update(data)
        self._idx.write(lengths.astype("<i4").data)
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.max_id = max(self.max_id, largest)
        self.longest_document = max(self.longest_document, int(lengths.max()))

    def publish(self, inputs: list[dict], counts: dict) -> Manifest:
        """Completes the index, flushes to disk and renames; returns the manifest.

        Args:
            inputs, counts: see `Manifest`.

        Raises:
            DataError: no document was added, or the prefix was taken meanwhile.
        """
        if self.documents == 0:
            raise DataError(
                f"{self._paths[0]}: nothing to write: the inputs give it no document with text "
                f"({', '.join(f'{count} {name}' for name, count in counts.items())})"
            )
        self._write_index()
        manifest = Manifest(
            dtype=self.dtype.name,
            documents=self.documents,
            tokens=self.tokens,
            max_id=self.max_id,
            longest_document=self.longest_document,
            cardinality=self.cardinality,
            eod_id=self.eod_id,
            bos_id=self.bos_id,
            special_text=self.special_text,
            tokenizer=self.tokenizer,
            inputs=inputs,
            bin_sha256=self._bin_sha256.hexdigest(),
            idx_sha256=self._hash_index(),
            counts=counts,
        )
        with open(self._temporaries[2], "x", encoding="utf-8") as f:
            f.write(manifest.to_json())
            flush_to_disk(f)
        flush_to_disk(self._bin)
        flush_to_disk(self._idx)
        self._refuse_existing()
        for temporary, path in zip(self._temporaries, self._paths, strict=True):
            os.rename(temporary, path)
        sync_folder(self._paths[0].parent)
        return manifest

    def _write_index(self) -> None:
        """Header, then pointers and document indices after the lengths that are there already."""
        code = DTYPE_CODES[self.dtype.name]
        header = HEADER.pack(MAGIC, VERSION, code, self.documents, self.documents + 1)
        self._idx.seek(0)
        self._idx.write(header)
        lengths_at, pointers_at = HEADER.size, HEADER.size + 4 * self.documents
        pointer = 0
        for first in range(0, self.documents, BLOCK):
            count = min(BLOCK, self.documents - first)
            self._idx.seek(lengths_at + 4 * first)
            lengths = np.frombuffer(self._idx.read(4 * count), dtype="<i4")
            ends = pointer + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            self._idx.seek(pointers_at + 8 * first)
            self._idx.write(np.append(pointer, ends[:-1]).astype("<i8").data)
            pointer = int(ends[-1])
        for first in range(0, self.documents + 1, BLOCK):
            stop = min(first + BLOCK, self.documents + 1)
            self._idx.write(np.arange(first, stop, dtype="<i8").data)

    def _hash_index(self) -> str:
        self._idx.seek(0)
        return hashlib.file_digest(self._idx, "sha256").hexdigest()

    def _refuse_existing(self) -> None:
        for path in self._paths:
            if path.exists():
                raise DataError(f"{path} exists; remove it or choose another output prefix")
