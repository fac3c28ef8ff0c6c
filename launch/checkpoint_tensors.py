"""Tensors of a stored checkpoint, one after the other, in one process without process groups."""

import io
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from mixtron.launch.checkpoint_files import CheckpointError, read_manifest

OPTIMIZER_PREFIX = "optimizer."


class StoredTensors:
    """What lies in a checkpoint folder. Memory is used for one tensor at a time.

    Raises:
        CheckpointError: no complete checkpoint, or its metadata cannot be read.
    """

    def __init__(self, path: Path):
        self.path, self.manifest = path, read_manifest(path)
        try:
            self._metadata = FileSystemReader(path).read_metadata()
        except Exception as error:
            raise CheckpointError(f"{path / '.metadata'}: cannot be read: {error}") from None
        self._entries = {
            name: entry
            for name, entry in sorted(self._metadata.state_dict_metadata.items())
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name].size)

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].properties.dtype

    def pieces(self, name: str) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Each stored rectangle of a tensor with its offset.

        Raises:
            CheckpointError: one cannot be read or has another shape, or they leave a gap.
        """
        entry, count = self._entries[name], 0
        for chunk in entry.chunks:
            place = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            file = self.path / place.relative_path
            try:
                with file.open("rb") as stream:
                    stream.seek(place.offset)
                    content = io.BytesIO(stream.read(place.length))
                piece = torch.load(content, map_location="cpu", weights_only=True)
            except Exception as error:
                line = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise CheckpointError(f"{file}: {name} cannot be read: {line}") from None
            if tuple(piece.shape) != tuple(chunk.sizes) or piece.dtype != self.dtype(name):
                raise CheckpointError(
                    f"{file}: {name} is {piece.dtype} {list(piece.shape)}, the metadata says "
                    f"{self.dtype(name)} {list(chunk.sizes)}"
                )
            count += piece.numel()
            yield tuple(chunk.offsets), piece
        if count != math.prod(self.shape(name)):
            raise CheckpointError(
                f"{self.path}: {count} of {math.prod(self.shape(name))} elements of {name} are "
                "stored"
            )

    def tensor(self, name: str) -> Tensor:
        """The whole of it, put together."""
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        for offset, piece in self.pieces(name):
            place = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
            whole[place] = piece
        return whole
