"""How fast a model's checkpoints are saved and loaded, against raw writes of the same bytes.

One rank, or several under torchrun; nothing but the model's part of the config is used:

    python -m mixtron.launch.checkpoint_bench configs/attention_400m.yaml DIR \
        model.layers=24 model.hidden_size=1792 model.ffn_hidden_size=5504
"""

import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from rich.console import Console
from rich.table import Table

from mixtron.launch.agreement import any_rank, gather
from mixtron.launch.checkpoint import find_checkpoint, load_checkpoint
from mixtron.launch.checkpoint_files import read_manifest
from mixtron.launch.checkpoint_shards import bytes_to_write, shards_to_save
from mixtron.launch.checkpoint_writer import CHUNK_BYTES, MAX_FILES
from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.config_sections import CheckpointConfig
from mixtron.launch.saver import Saver
from mixtron.launch.train import quiet_libraries
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.optimizer import build_optimizer, wrap_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel

Rows = list[tuple[str, float, int]]
"""What was done, its seconds on the slowest rank, and the bytes of all ranks (0: of no meaning)."""


def main(argv: list[str]) -> None:
    """CONFIG DIR [key.path=value ...]; prints a table on rank 0."""
    quiet_libraries()
    path, folder, *overrides = argv
    config = load_config(path, overrides)
    parallel = config.parallel
    ranks = init_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline,
        parallel.context,
        seed=1,
        device=init_distributed(),
    )
    root = Path(folder) / "checkpoint_bench"
    model = build(config, ranks)
    try:
        show(measure(root, config, model, ranks), ranks)
    finally:
        dist.barrier()
        if ranks.is_first:
            shutil.rmtree(root, ignore_errors=True)
    dist.destroy_process_group()


Model = tuple[list, MegatronOptimizer]


def build(config: RunConfig, ranks: Ranks) -> Model:
    """Model and optimizer, whose moments are made by the first save."""
    bf16 = config.training.precision == "bf16"
    chunks = build_model(
        config.model, config.mixers, config.parallel, ranks, seed=1, bf16=bf16, max_tokens=1024
    )
    wrapped = wrap_model(chunks, config.parallel, ranks)
    return wrapped, build_optimizer(wrapped, config.optimizer, ranks, bf16=bf16)


def measure(root: Path, config: RunConfig, model: Model, ranks: Ranks) -> Rows:
    own = bytes_to_write(shards_to_save(*model, ranks))
    total = sum(gather(own))
    root.mkdir(parents=True, exist_ok=True)
    rows: Rows = [("raw write and fsync", timed(lambda: write_raw(root, own, ranks), ranks), total)]

    def saver(asynchronous: bool) -> Saver:
        options = CheckpointConfig(save_every_steps=1, keep=2, asynchronous=asynchronous)
        return Saver(root, options, ranks, lambda text: None)

    def save(saver: Saver, step: int) -> None:
        saver.save(step, *model, {}, config)

    waiting, beside = saver(False), saver(True)
    rows.append(("save, waiting", timed(lambda: save(waiting, 1), ranks), total))
    rows.append(("reserve host memory, once", timed(lambda: beside.reserve(*model), ranks), 0))
    for step in (2, 3):
        plain = timed(lambda: work(ranks), ranks)
        blocked = timed(lambda step=step: save(beside, step), ranks)
        started, rounds = time.perf_counter(), 0
        while any_rank(ranks.device, beside.writing)[0]:
            work(ranks)
            rounds += 1
        during = (time.perf_counter() - started) / max(rounds, 1)
        written = time.perf_counter() - started
        blocked += timed(beside.finish, ranks)
        name = "first" if step == 2 else "next"
        rows.append((f"save beside training ({name}): until written", written, total))
        rows.append((f"save beside training ({name}): training waits", blocked, 0))
        rows.append((f"save beside training ({name}): work slows by", during - plain, 0))
    path = root / "step_00000003"
    forget(path)
    hashed = timed(lambda: find_checkpoint(root, "auto", ranks), ranks)
    loaded = timed(lambda: load_checkpoint(path, *model, ranks), ranks)
    rows.append(("resume: read and hash", hashed, total))
    rows.append(("resume: load", loaded, total))
    rows.append(("resume", hashed + loaded, total))
    return rows


def timed(action: Callable, ranks: Ranks) -> float:
    """Seconds on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    action()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return max(gather(time.perf_counter() - started))


def work(ranks: Ranks) -> None:
    """Something like a training step: many small launches and one wait."""
    x = torch.ones(512, 512, device=ranks.device)
    for _ in range(200):
        x = torch.tanh(x @ x)
    float(x.sum())


def write_raw(root: Path, size: int, ranks: Ranks) -> None:
    """As many bytes as this rank saves, in as many files, without a hash."""
    chunk = secrets.token_bytes(CHUNK_BYTES)

    def write(number: int) -> None:
        with (root / f"raw_{ranks.world_rank}_{number}").open("wb", buffering=0) as stream:
            for _ in range(size // MAX_FILES // CHUNK_BYTES):
                stream.write(chunk)
            stream.write(chunk[: size // MAX_FILES % CHUNK_BYTES])
            os.fsync(stream.fileno())

    with ThreadPoolExecutor(MAX_FILES) as pool:
        list(pool.map(write, range(MAX_FILES)))
    for number in range(MAX_FILES):
        (root / f"raw_{ranks.world_rank}_{number}").unlink()


def forget(path: Path) -> None:
    """Drops files from the page cache, so that they are read from the disk."""
    for name in read_manifest(path)["files"]:
        with (path / name).open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def show(rows: Rows, ranks: Ranks) -> None:
    if not ranks.is_first:
        return
    raw = rows[0][1]
    size = rows[0][2] / 2**30
    table = Table("", "seconds", "GiB/s", "times raw", title=f"{size:,.2f} GiB", box=None)
    for name, seconds, count in rows:
        rate = f"{count / 2**30 / seconds:,.2f}" if count else ""
        table.add_row(name, f"{seconds:,.3f}", rate, f"{seconds / raw:,.2f}" if count else "")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
