"""`mixtron bench lengths`: how a step's time and memory grow with the sequence, tokens constant."""

import gc
from collections.abc import Sequence

import torch

from mixtron.kernels.measure import table, versions
from mixtron.launch.bench.step import RandomTokens, begin, build_run, seconds_per_step
from mixtron.launch.checks import check
from mixtron.launch.config import load_config
from mixtron.launch.estimate import peak_flops, training_flops_per_token
from mixtron.launch.loop import train_step
from mixtron.megatron_ext.errors import ConfigError

WARM_UP = 4
"""Layers are recorded in the last of them (layer_graphs.py)."""


def bench_lengths(
    runs: Sequence[str], overrides: Sequence[str], lengths: Sequence[int], tokens: int, steps: int
) -> None:
    """Prints a table on one GPU: a row a run, for each length tokens/s, MFU and GiB at the peak.

    Args:
        runs: "CONFIG key=value ...".
        tokens: of a step, one micro-batch, at every length.
    Raises:
        ConfigError: a length that does not divide `tokens`, a config that cannot be, or no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("mixtron bench lengths needs a GPU, and there is none")
    for length in lengths:
        if tokens % length:
            raise ConfigError(f"--tokens {tokens} is not a multiple of --length {length}")
    rows = []
    for path, *own in (run.split() for run in runs):
        cells = [" ".join([path, *own])]
        for length in lengths:
            batch = [
                f"data.sequence_length={length}",
                f"training.micro_batch_sequences={tokens // length}",
                f"training.global_batch_tokens={tokens}",
            ]
            cells.append(measured(path, [*overrides, *own, *batch], steps))
            print(f"{cells[0]} at {length:,}: {cells[-1]}", flush=True)
        rows.append(cells)
    print(f"\n{versions()}; {tokens:,} tokens a step; tokens/s, MFU, peak GiB; {overrides}\n")
    print(table(("run", *(f"T = {length:,}" for length in lengths)), rows))


def measured(path: str, overrides: list[str], steps: int) -> str:
    """Tokens/s, MFU and GiB at the peak, or that memory did not suffice."""
    config = load_config(path, overrides)
    check(config, 1)
    ranks = begin(config)
    torch.cuda.reset_peak_memory_stats()
    run = None
    try:
        data = RandomTokens(config.data.sequence_length, config.model.vocab_size, documents=1)
        run = build_run(config, ranks, data)
        for _ in range(WARM_UP):
            train_step(run)
        speed = config.training.global_batch_tokens / seconds_per_step(run, steps)
        peak, flops = peak_flops(torch.cuda.get_device_name()), training_flops_per_token(config)
        mfu = "-" if peak is None else f"{speed * flops / peak:.1%}"
        return f"{speed:,.0f}, {mfu}, {torch.cuda.max_memory_allocated() / 2**30:.1f}"
    except torch.OutOfMemoryError:
        return "out of memory"
    finally:
        del run
        gc.collect()
        torch.cuda.empty_cache()
