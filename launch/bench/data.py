"""`mixtron bench data`: how fast a config's samples are read and collated on one rank's host."""

import time

from mixtron.kernels.measure import table
from mixtron.launch.config import RunConfig
from mixtron.launch.data import open_data
from mixtron.launch.micro_batch import collate
from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel


def bench_data(config: RunConfig, micro_batches: int, tokens_per_s: float) -> None:
    """Prints tokens/s of reading and collating, in the order of training, beside the need.

    Raises:
        ConfigError, DataError: as training does.
    """
    _, data, _ = open_data(config)
    ranks = init_model_parallel(seed=config.training.seed, device=init_distributed())
    per_micro = config.training.micro_batch_sequences
    seconds = {"read": 0.0, "collate": 0.0}
    for _ in range(micro_batches):
        started = time.perf_counter()
        samples = [data.read(entry) for entry in data.next(per_micro)]
        read = time.perf_counter()
        collate(samples, 1, ranks)
        seconds["read"] += read - started
        seconds["collate"] += time.perf_counter() - read
    tokens = micro_batches * per_micro * config.data.sequence_length
    rows = [
        (part, f"{tokens / spent:,.0f}", f"{tokens_per_s * spent / tokens:.2%}")
        for part, spent in {**seconds, "together": sum(seconds.values())}.items()
    ]
    said = f"{micro_batches} micro-batches of {per_micro} x {config.data.sequence_length:,} tokens"
    print(f"{said}\n")
    share = f"of the time of a rank that trains {tokens_per_s:,.0f} tokens/s"
    print(table(("part", "tokens/s", share), rows))
