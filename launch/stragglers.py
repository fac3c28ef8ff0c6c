"""Which rank is slow. Steps end together, however late one rank comes: so each is also timed alone.

`ranks/step_s_*` is the wall time of the last step; `ranks/probe_s_*` that of a fixed matrix product
that a rank makes without the others, which a hot, throttled or crowded node does slowly.
"""

import time
from collections.abc import Callable

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
    values = {}
    for column, name in ((1, "step_s"), (2, "probe_s")):
        seconds = sorted(answer[column] for answer in answers)
        values[f"ranks/{name}_median"] = seconds[(len(seconds) - 1) // 2]
        values[f"ranks/{name}_max"] = seconds[-1]
    for line in slow_ranks(answers):
        say(line)
    return values


def slow_ranks(answers: list[tuple[str, float, float]]) -> list[str]:
    """One line for each rank far above the median of the ranks' (node, step_s, probe_s)."""
    lines = []
    for column, what in ((1, "its step"), (2, "a fixed matrix product")):
        seconds = sorted(answer[column] for answer in answers)
        median_s = seconds[(len(seconds) - 1) // 2]
        for rank, answer in enumerate(answers):
            if answer[column] > SLOW * median_s:
                lines.append(
                    f"slow: rank {rank} on {answer[0]} took {answer[column] / median_s:.1f} times "
                    f"the ranks' median for {what} ({answer[column]:.3g} s)"
                )
    return lines


def probe_s(device: torch.device) -> float:
    """The best of three tries at a matrix product of a few milliseconds. Draws no random number."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(3):
        _synchronize(device)
        started = time.perf_counter()
        matrix @ matrix
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - started)
    return best_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
