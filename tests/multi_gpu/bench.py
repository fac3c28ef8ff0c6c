"""How fast a config's steps are, on random tokens, and what a rank communicates in one."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from mixtron.launch.agreement import gather
from mixtron.launch.checks import check, check_device
from mixtron.launch.config import RunConfig
from mixtron.launch.loop import speed
from mixtron.launch.micro_batch import MicroBatch, collate, run_micro_batches
from mixtron.launch.sample_stream import Sample
from mixtron.megatron_ext.layer_graphs import EAGER_MICRO_BATCHES, LayerGraphs
from mixtron.megatron_ext.model import build_model
from mixtron.megatron_ext.optimizer import build_optimizer, clip_and_step, wrap_model
from mixtron.megatron_ext.parallel import Ranks, init_distributed
from tests.multi_gpu.communication import Communication, read_trace
from tests.multi_gpu.groups import ranks_of


@dataclass
class Bench:
    """One rank's model and the micro-batches of its step."""

    config: RunConfig
    ranks: Ranks
    wrapped: list
    optimizer: MegatronOptimizer
    micro_batches: list[MicroBatch]

    def step(self) -> None:
        """As the training loop's, over the same tokens each time; waits for the GPU."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        run_micro_batches(self.wrapped, self.config, self.ranks, self.micro_batches, train=True)
        clip_and_step(self.optimizer, self.config.optimizer.clip_grad_norm)


def build(config: RunConfig) -> Bench:
    """All ranks of the world call it. Raises ConfigError for what does not fit the ranks."""
    device = init_distributed()
    check(config, dist.get_world_size(), packed=False)
    check_device(config, device.type)
    parallel, training = config.parallel, config.training
    ranks = ranks_of(parallel)
    per_micro, length = training.micro_batch_sequences, config.data.sequence_length
    bf16 = training.precision == "bf16"
    chunks = build_model(
        config.model,
        config.mixers,
        parallel,
        ranks,
        seed=training.seed,
        bf16=bf16,
        recompute=training.recompute == "full",
        max_tokens=per_micro * length,
    )
    wrapped = wrap_model(chunks, parallel, ranks)
    if training.layer_graphs:
        LayerGraphs(wrapped[0])
    optimizer = build_optimizer(wrapped, config.optimizer, ranks, bf16=bf16)
    generator = np.random.default_rng(ranks.data_rank)
    count = config.global_batch_sequences // (ranks.data_size * per_micro)
    micro_batches = [
        collate([_sample(generator, config) for _ in range(per_micro)], 1, ranks)
        for _ in range(count)
    ]
    return Bench(config, ranks, wrapped, optimizer, micro_batches)


def _sample(generator: np.random.Generator, config: RunConfig) -> Sample:
    """One document of random tokens."""
    length = config.data.sequence_length
    tokens = generator.integers(0, config.model.vocab_size, length + 1)
    return Sample(tokens, np.array([0]), np.ones(length, dtype=bool))


def measure(bench: Bench, steps: int = 4, limit_s: float = 3.0) -> dict[str, float]:
    """The median of `steps` steps (fewer when they outlast the limit) after some to warm up.

    Returns:
        As the training loop logs it: speed/step_s, speed/tokens_per_s, speed/mfu (on a known GPU)
        and memory/peak_gib, the slowest rank's time and this rank's memory.
    """
    cuda = bench.ranks.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    warm_up = 2
    if bench.config.training.layer_graphs:
        warm_up += EAGER_MICRO_BATCHES // len(bench.micro_batches)
    for _ in range(warm_up):
        bench.step()
    times: list[float] = []
    while len(times) < steps and sum(times) < limit_s:
        dist.barrier()
        started = time.perf_counter()
        bench.step()
        times.append(max(gather(time.perf_counter() - started)))
    return speed(bench.config, bench.ranks, statistics.median(times))


def profile(bench: Bench) -> Communication:
    """What this rank's GPU communicates in one step, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        bench.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)
