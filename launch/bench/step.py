"""`mixtron bench step`: speed, memory and kernels of a config's training step, on random tokens.

The step is the training loop's own. Also for several ranks, under torchrun:

    torchrun --nproc-per-node 8 -m mixtron.launch.bench.step configs/kla_400m.yaml [key=value ...]
"""

import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mixtron.kernels.measure import table, versions
from mixtron.launch.bench.account import account
from mixtron.launch.bench.peer import bench_peer, kind_of, missing
from mixtron.launch.bench.profile import profile
from mixtron.launch.checks import check, check_device
from mixtron.launch.config import RunConfig, load_config
from mixtron.launch.estimate import parameters, peak_flops, training_flops_per_token
from mixtron.launch.loop import Progress, Run, train_step
from mixtron.launch.memory import memory_per_rank
from mixtron.launch.sample_stream import Sample
from mixtron.launch.saver import Saver
from mixtron.launch.train import quiet_libraries
from mixtron.megatron_ext.layer_graphs import LayerGraphs, release_recordings
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.optimizer import build_optimizer, wrap_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed, init_model_parallel


@dataclass(frozen=True)
class Options:
    steps: int = 10
    warm_up: int = 4
    micro_batches: int = 1
    """Of each data-parallel rank, a step."""
    documents: int = 1
    """Of each sequence, of about equal length."""
    profiled_steps: int = 2
    """After the timed ones; 0: no table of kernels."""
    rows: int = 40
    """Of that table."""
    peer: bool = True
    """Another library's model as well, where one is known and installed."""


class RandomTokens:
    """Training data without files."""

    def __init__(self, sequence_length: int, vocab_size: int, documents: int) -> None:
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        self.starts = np.arange(documents) * sequence_length // documents
        self.drawn = 0

    def next(self, count: int) -> list[int]:
        plan = self.upcoming(count)
        self.drawn += count
        return plan

    def upcoming(self, count: int) -> list[int]:
        return list(range(self.drawn, self.drawn + count))

    def read(self, number: int) -> Sample:
        generator = np.random.default_rng(number)
        tokens = generator.integers(0, self.vocab_size, self.sequence_length + 1)
        mask = np.ones(self.sequence_length, dtype=bool)
        mask[self.starts[1:] - 1] = False
        return Sample(tokens, self.starts, mask)

    def realised_shares(self) -> dict[str, float]:
        return {}


def bench_step(config: RunConfig, options: Options) -> None:
    """Prints the tables on rank 0. Raises errors with an exit code for what a person must mend."""
    ranks = begin(config)
    config = with_micro_batches(config, ranks.data_size, options.micro_batches)
    check(config, ranks.world_size, packed=False)
    say: Callable[[str], None] = print if ranks.is_first else lambda text: None
    length, vocabulary = config.data.sequence_length, config.model.vocab_size
    run = build_run(config, ranks, RandomTokens(length, vocabulary, options.documents))
    for _ in range(options.warm_up):
        train_step(run)
    memory = memory_by_part(run) if ranks.device.type == "cuda" else []
    seconds = seconds_per_step(run, options.steps)
    say(report(config, ranks, seconds))
    if memory:
        say(table(("memory of rank 0", "GiB", "predicted by `mixtron validate`"), memory))
    if options.profiled_steps:
        tables, kinds_ms = profile(lambda: train_step(run), options.profiled_steps, options.rows)
        peak = peak_of(ranks)
        if peak is not None:
            say(account(config, kinds_ms, 1000 * seconds, ranks.world_size, peak) + "\n")
        say(tables)
    kind = kind_of(config)
    alone_on_gpu = ranks.world_size == 1 and ranks.device.type == "cuda"
    if options.peer and alone_on_gpu and kind and not missing(kind):
        del run
        release_recordings()
        gc.collect()
        bench_peer(config, options.steps, options.warm_up)


def begin(config: RunConfig) -> Ranks:
    """Joins the world. Raises ConfigError for what its devices cannot run."""
    device, parallel = init_distributed(), config.parallel
    check_device(config, device.type)
    return init_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        parallel.virtual_pipeline,
        parallel.context,
        seed=config.training.seed,
        device=device,
    )


def with_micro_batches(config: RunConfig, data_ranks: int, micro_batches: int) -> RunConfig:
    """The config with a global batch of so many micro-batches a data-parallel rank."""
    sequences = micro_batches * data_ranks * config.training.micro_batch_sequences
    batch = {"global_batch_tokens": sequences * config.data.sequence_length}
    return config.model_copy(update={"training": config.training.model_copy(update=batch)})


def build_run(config: RunConfig, ranks: Ranks, data: Any) -> Run:
    """What training builds, without checkpoints."""
    training = config.training
    chunks = build_model(
        config.model,
        config.mixers,
        config.parallel,
        ranks,
        seed=training.seed,
        bf16=training.precision == "bf16",
        recompute=training.recompute == "full",
        recomputed=training.recomputed,
        max_tokens=training.micro_batch_sequences * config.data.sequence_length,
    )
    wrapped = wrap_model(chunks, config.parallel, ranks)
    if training.layer_graphs:
        LayerGraphs(wrapped[0])
    optimizer = build_optimizer(wrapped, config.optimizer, ranks, bf16=training.precision == "bf16")
    nowhere = Path(tempfile.gettempdir()) / "mixtron_bench_saves_nothing"
    say: Callable[[str], None] = lambda text: None  # noqa: E731
    saver = Saver(nowhere, config.checkpoint, ranks, say)
    return Run(config, ranks, wrapped, optimizer, data, {}, Progress(), saver, say)


def seconds_per_step(run: Run, steps: int) -> float:
    """Mean over the steps, which follow one another as in training."""
    wait(run.ranks)
    started = time.perf_counter()
    for _ in range(steps):
        train_step(run)
    wait(run.ranks)
    return (time.perf_counter() - started) / steps


def wait(ranks: Ranks) -> None:
    """Until every rank has done what it was given."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def memory_by_part(run: Run) -> list[tuple[str, float, float]]:
    """(part, measured, predicted) GiB of this rank at the peak of one step."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    train_step(run)
    torch.cuda.synchronize()
    parameter_bytes = sum(p.nbytes for chunk in run.wrapped for p in chunk.parameters())
    gradient_bytes = sum(
        buffer.grad_data.nbytes
        for chunk in run.wrapped
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
    )
    recorded = held_by_recordings()
    peak = torch.cuda.max_memory_allocated() + recorded
    predicted = memory_per_rank(run.config, run.ranks.world_size)
    rows = [
        ("weights", parameter_bytes, predicted["weights"]),
        ("gradients", gradient_bytes, predicted["gradients"]),
        (
            "optimizer and other held",
            held - parameter_bytes - gradient_bytes,
            predicted["optimizer"],
        ),
        (
            "activations and temporary",
            peak - held,
            predicted["activations"] + predicted["temporary"],
        ),
        ("peak", peak, sum(predicted.values())),
    ]
    return [(name, measured / 2**30, expected / 2**30) for name, measured, expected in rows]


def held_by_recordings() -> int:
    """Bytes that torch counts as free, and that only the replays of recorded layers may use."""
    segments = torch.cuda.memory_snapshot()
    private = [s for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def report(config: RunConfig, ranks: Ranks, seconds: float) -> str:
    """Speed, in a table of one row, under what was measured."""
    tokens = config.training.global_batch_tokens
    flops = training_flops_per_token(config) * tokens / seconds / ranks.world_size
    on_gpu = ranks.device.type == "cuda"
    machine = versions() if on_gpu else f"CPU, torch {torch.__version__}"
    peak = peak_of(ranks)
    mfu = "-" if peak is None else f"{flops / peak:.1%}"
    row = (
        config.name,
        f"{sum(parameters(config).values()) / 1e6:,.1f} M",
        f"{tokens:,}",
        f"{1000 * seconds:,.1f}",
        f"{tokens / seconds:,.0f}",
        f"{flops / 1e12:,.1f}",
        mfu,
    )
    heads = ("config", "parameters", "tokens a step", "ms a step", "tokens/s", "TFLOP/s", "MFU")
    return f"{machine}; {ranks.world_size} ranks\n\n{table(heads, [row])}\n"


def peak_of(ranks: Ranks) -> float | None:
    """This rank's GPU's, FLOP/s; None where it is not known."""
    on_gpu = ranks.device.type == "cuda"
    return peak_flops(torch.cuda.get_device_name()) if on_gpu else None


if __name__ == "__main__":
    quiet_libraries()
    bench_step(load_config(sys.argv[1], sys.argv[2:]), Options())
    release_recordings()
    dist.destroy_process_group()
