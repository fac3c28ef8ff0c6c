"""What `mixtron ckpt` does: verify, compare, and convert to one file and back."""

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from mixtron.launch.checkpoint_files import (
    MANIFEST,
    CheckpointError,
    file_problem,
    list_checkpoints,
    read_manifest,
    sync_folder,
)
from mixtron.launch.checkpoint_tensors import OPTIMIZER_PREFIX, StoredTensors
from mixtron.launch.whole_files import replaced

Track = Callable[[Iterable[str]], Iterable[str]]
"""Shows progress over names."""

HEADER_KEY = "mixtron_checkpoint"
"""Of the safetensors header's metadata: the checkpoint's manifest."""
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def checkpoints_of(path: Path) -> Path:
    """The folder of checkpoints, given it or its run folder.

    Raises:
        CheckpointError: there is no such folder.
    """
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not root.is_dir():
        raise CheckpointError(f"{path}: no such run folder or folder of checkpoints")
    return root


def checkpoint_paths(path: Path) -> list[Path]:
    """A checkpoint alone, or every one of a run, the oldest first.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file() or path.name.startswith("step_"):
        return [path]
    found = [info.path for info in list_checkpoints(checkpoints_of(path))]
    if not found:
        raise CheckpointError(f"{path}: no checkpoint there")
    return found


# Verify


def problems_of(path: Path, track: Track) -> list[str]:
    """What is wrong with a checkpoint: files, SHA-256, tensors that cannot be read or not finite.

    Raises:
        CheckpointError: it has no manifest to start from.
    """
    files = read_manifest(path)["files"]
    with ThreadPoolExecutor() as pool:
        checked = pool.map(lambda name: file_problem(path / name, files[name], hashes=True), files)
        problems = [problem for problem in checked if problem]
    try:
        stored = StoredTensors(path)
    except CheckpointError as error:
        return [*problems, str(error)]
    for name in track(stored.names):
        try:
            bad = sum(_count_not_finite(piece) for _, piece in stored.pieces(name))
            if bad:
                problems.append(f"{path}: {bad} elements of {name} are not finite")
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _count_not_finite(tensor: torch.Tensor) -> int:
    return int((~tensor.isfinite()).sum()) if tensor.is_floating_point() else 0


# Compare


@dataclass(frozen=True)
class TensorDifference:
    name: str
    what: str
    relative: float
    """Norm of the difference by the first one's norm; infinite where shapes differ."""


@dataclass
class Comparison:
    """Every tensor of two checkpoints, by what is found of it."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    different: list[TensorDifference] = field(default_factory=list)
    """The most different first."""
    equal: list[str] = field(default_factory=list)
    """Bit for bit, in the same dtype."""


def compare_tensors(a: Path, b: Path, track: Track) -> Comparison:
    """Reads both checkpoints tensor by tensor, whatever layouts they were saved in."""
    first, second = StoredTensors(a), StoredTensors(b)
    result = Comparison()
    for name in track(sorted({*first.names, *second.names})):
        if name not in second.names:
            result.only_first.append(name)
        elif name not in first.names:
            result.only_second.append(name)
        elif difference := _difference(first, second, name):
            result.different.append(difference)
        else:
            result.equal.append(name)
    result.different.sort(key=lambda d: -d.relative)
    return result


def _difference(a: StoredTensors, b: StoredTensors, name: str) -> TensorDifference | None:
    if a.shape(name) != b.shape(name):
        what = f"shape {list(a.shape(name))} and {list(b.shape(name))}"
        return TensorDifference(name, what, float("inf"))
    x, y = a.tensor(name), b.tensor(name)
    if x.dtype == y.dtype and torch.equal(x, y):
        return None
    delta = x.double() - y.double()
    relative = float(delta.norm() / x.double().norm().clamp_min(1e-300))
    dtypes = "" if x.dtype == y.dtype else f", {x.dtype} and {y.dtype}"
    what = f"largest difference {float(delta.abs().max()):.3e}, relative {relative:.3e}{dtypes}"
    return TensorDifference(name, what, relative)


# Convert


def to_safetensors(path: Path, target: Path, track: Track, *, optimizer: bool) -> None:
    """Writes one file with every whole tensor; memory is used for one at a time.

    Its header carries the manifest, so that `from_safetensors` can make a checkpoint of it.

    Args:
        optimizer: whether the optimizer's state comes along.
    """
    stored = StoredTensors(path)
    names = [n for n in stored.names if optimizer or not n.startswith(OPTIMIZER_PREFIX)]
    header: dict[str, dict] = {"__metadata__": {HEADER_KEY: json.dumps(stored.manifest)}}
    end = 0
    for name in names:
        shape, dtype = stored.shape(name), stored.dtype(name)
        start, end = end, end + torch.empty(shape, dtype=dtype, device="meta").nbytes
        kind = SAFETENSORS_DTYPES[dtype]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replaced(target) as file, file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in track(names):
            flat = stored.tensor(name).reshape(-1).view(torch.uint8)
            stream.write(flat.numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(target.parent)


def from_safetensors(file: Path, root: Path) -> Path:
    """Makes `root/step_<step>` of a file that `to_safetensors` wrote.

    With the optimizer's state in it a run can be resumed from it, else `init_from` takes it.

    Raises:
        CheckpointError: not such a file, or the folder holds that step already.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    from mixtron.launch.checkpoint import write_checkpoint
    from mixtron.launch.checkpoint_files import step_name
    from mixtron.launch.checkpoint_shards import common_state_shard
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    try:
        opened = safe_open(file, framework="pt")
        manifest = json.loads((opened.metadata() or {})[HEADER_KEY])
    except Exception as error:
        raise CheckpointError(
            f"{file}: not a file that `mixtron ckpt convert` wrote ({type(error).__name__}: "
            f"{error})"
        ) from None
    if (root / step_name(manifest["step"])).exists():
        raise CheckpointError(f"{root / step_name(manifest['step'])}: is there already")
    ranks = init_model_parallel(seed=0, device=init_distributed())
    with opened as tensors:
        shards = {
            "tensors": {
                name: ShardedTensor.from_rank_offsets(name, tensors.get_tensor(name))
                for name in tensors.keys()  # noqa: SIM118
            },
            "common_state": common_state_shard(ranks),
        }
        # The random states of the ranks that saved are gone.
        return write_checkpoint(root, shards, {**manifest, "layout": {}}, ranks)
