"""Which rank is slow. Steps end together, however late one rank comes: so each is also timed alone.

`ranks/step_s_*` is the wall time of the last step; `ranks/probe_s_*` that of a fixed matrix product
that a rank makes without the others, which a hot, throttled or crowded node does slowly.
"""

import time
from collections.abc import Callable
from statistics import median_low

import torch
import torch.distributed as dist

from mixtron.launch.slurm.bad_nodes import node_name

SLOW = 1.5
"""Times the median, from which on a rank is named."""


def compare_ranks(
    device: torch.device, step_s: float, say: Callable[[str], None]
) -> dict[str, float]:
    """Medians and maxima over all ranks, for the log; names the slow ones. All ranks call it."""
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (node_name(), step_s, probe_s(device)))
    nodes, step_times, probe_times = map(list, zip(*answers, strict=True))
    for line in [
        *slow_ranks(nodes, step_times, "its step"),
        *slow_ranks(nodes, probe_times, "a fixed matrix product"),
    ]:
        say(line)
    return {
        "ranks/step_s_median": median_low(step_times),
        "ranks/step_s_max": max(step_times),
        "ranks/probe_s_median": median_low(probe_times),
        "ranks/probe_s_max": max(probe_times),
    }


def slow_ranks(nodes: list[str], times_s: list[float], what: str) -> list[str]:
    """One line for each rank far above the median of the ranks' times for `what`."""
    median_s = median_low(times_s)
    return [
        f"slow: rank {rank} on {node} took {time_s / median_s:.1f} times the ranks' median for "
        f"{what} ({time_s:.3g} s)"
        for rank, (node, time_s) in enumerate(zip(nodes, times_s, strict=True))
        if time_s > SLOW * median_s
    ]


def probe_s(device: torch.device) -> float:
    """The best of three tries at a matrix product of a few milliseconds. Draws no random number."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(3):
        _synchronize(device)
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - started)
    return best_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
