"""One rank's part of a checkpoint on its way to the disk. No process group, no Megatron.

Tensors are written as torch's distributed format has them, so that Megatron reads them. A file is
hashed while it is written: SHA-256, file writes and fsync all release the interpreter's lock.
"""

import hashlib
import io
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mixtron.launch.checkpoint_files import CheckpointError

Piece = tuple[WriteItem, Tensor | io.BytesIO]
"""Where something belongs in the checkpoint, and the thing itself."""

MAX_FILES = 4
"""Written side by side by a rank: one thread hashes about as fast as it writes."""
MIN_FILE_BYTES = 1 << 26
CHUNK_BYTES = 1 << 24
ALIGNMENT_BYTES = 64


# Host memory


class HostMemory:
    """Where a rank's tensors are copied to, so that training may change them; pinned for a GPU.

    It is kept from save to save: to pin memory takes longer than to fill it.
    """

    def __init__(self, device: torch.device):
        self._pin = device.type == "cuda"
        self._held = np.empty(0, dtype=np.uint8)

    def reserve(self, size: int) -> None:
        """Holds at least `size` bytes.

        Raises:
            CheckpointError: exit code 2: this machine has not so much memory left.
        """
        if size <= len(self._held):
            return
        self._release()
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        available = psutil.virtual_memory().available
        if size * ranks_here > available:
            raise CheckpointError(
                f"checkpoint.asynchronous=true needs {size * ranks_here / 2**30:,.1f} GiB of host "
                f"memory for the copies of {ranks_here} ranks, and {available / 2**30:,.1f} GiB "
                "are available; set it to false, or use more nodes"
            )
        self._held = np.empty(size, dtype=np.uint8)
        if self._pin:
            address = self._held.ctypes.data
            status = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[union-attr]
            if status != 0:
                self._pin = False
                raise CheckpointError(
                    f"CUDA cannot pin {size / 2**30:,.1f} GiB of host memory (error {status}); "
                    "set checkpoint.asynchronous=false"
                )

    def copy(self, pieces: list[Piece]) -> list[Piece]:
        """Copies every tensor; the copies are valid until the next call."""
        tensors = [data for _, data in pieces if isinstance(data, Tensor)]
        starts = np.cumsum([0, *(_aligned(t.nbytes) for t in tensors)])
        self.reserve(int(starts[-1]))
        copies = {}
        for tensor, start in zip(tensors, starts, strict=False):
            flat = torch.from_numpy(self._held[start : start + tensor.nbytes])
            copy = flat.view(tensor.dtype).view(tensor.shape)
            copies[id(tensor)] = copy.copy_(tensor.detach(), non_blocking=True)
        if self._pin:
            torch.cuda.synchronize()
        return [
            (item, copies[id(data)] if isinstance(data, Tensor) else data) for item, data in pieces
        ]

    def _release(self) -> None:
        if self._pin and len(self._held):
            torch.cuda.cudart().cudaHostUnregister(self._held.ctypes.data)  # type: ignore[union-attr]
        self._held = np.empty(0, dtype=np.uint8)


def bytes_to_copy(pieces: list[Piece]) -> int:
    """What `HostMemory` must hold for them."""
    return sum(_aligned(data.nbytes) for _, data in pieces if isinstance(data, Tensor))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# Files


@dataclass(frozen=True)
class Written:
    """What a rank put on the disk."""

    results: list[WriteResult]
    """Where each piece lies, for torch's metadata."""
    files: dict[str, dict]
    """The manifest's entries: bytes and SHA-256 by name."""
    seconds: float


class Writing:
    """A rank's files being written by threads of their own."""

    def __init__(self, folder: Path, rank: int, pieces: list[Piece]):
        self._started = time.perf_counter()
        self._threads = [
            _Thread(lambda path=folder / f"__{rank}_{i}.distcp", part=part: write_file(path, part))
            for i, part in enumerate(_parts(pieces))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def wait(self) -> Written:
        """Waits until everything is on the disk.

        Raises:
            OSError, RuntimeError: what went wrong in a thread.
        """
        for thread in self._threads:
            thread.join()
        done = [thread.outcome() for thread in self._threads]
        return Written(
            [result for results, _ in done for result in results],
            {path.name: entry for _, (path, entry) in done},
            max([thread.ended for thread in self._threads], default=self._started) - self._started,
        )


class _Thread[T](threading.Thread):
    """A call in the background. It does not keep a process alive whose training failed."""

    def __init__(self, work: Callable[[], T]):
        super().__init__(daemon=True)
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.ended = 0.0

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error
        self.ended = time.perf_counter()

    def outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def _parts(pieces: list[Piece]) -> list[list[Piece]]:
    """Shares of about equal size, one a file: the largest first, each to the smallest share."""
    total = sum(map(_size, pieces))
    count = min(MAX_FILES, 1 + total // MIN_FILE_BYTES)
    parts, sizes = [[] for _ in range(count)], [0] * count
    for piece in sorted(pieces, key=_size, reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(piece)
        sizes[smallest] += _size(piece)
    return parts


def _size(piece: Piece) -> int:
    _, data = piece
    return data.nbytes if isinstance(data, Tensor) else data.getbuffer().nbytes


def write_file(path: Path, pieces: list[Piece]) -> tuple[list[WriteResult], tuple[Path, dict]]:
    """Writes, hashes and syncs one file."""
    results = []
    with path.open("wb", buffering=1 << 20) as raw:
        stream = HashedStream(raw)
        for item, data in pieces:
            start = stream.position
            write_piece(stream, data)
            length = stream.position - start
            place = _StorageInfo(path.name, start, length)
            results.append(WriteResult(item.index, length, place))
        raw.flush()
        os.fsync(raw.fileno())
    return results, (path, {"bytes": stream.position, "sha256": stream.digest.hexdigest()})


def write_piece(stream: "HashedStream", data: Tensor | io.BytesIO) -> None:
    if isinstance(data, Tensor):
        torch.save(_alone(data.detach().cpu()), stream)  # type: ignore[arg-type]
    else:
        stream.write(data.getbuffer())


def _alone(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: torch saves the whole of what a view looks into."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(flat).view(tensor.dtype).view(tensor.shape)


class HashedStream:
    """What `torch.save` writes to."""

    def __init__(self, raw: BinaryIO):
        self._raw = raw
        self.digest = hashlib.sha256()
        self.position = 0

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self.digest.update(chunk)
            self._raw.write(chunk)
            if len(chunk) == CHUNK_BYTES:
                # Asks the system to begin with the disk now rather than at the fsync.
                place = (self.position, CHUNK_BYTES, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(self._raw.fileno(), *place)
            self.position += len(chunk)
        return len(view)

    def flush(self) -> None:
        self._raw.flush()
