"""What is checked once all ranks have met, before a model is built: one answer from each rank."""

import os
import time

import torch
import torch.distributed as dist

from mixtron.launch.heartbeat import LOGS_VARIABLE
from mixtron.launch.slurm.bad_nodes import NodeError, node_name, report

CLOCK_TOLERANCE_S = 5.0
FREE_MEMORY_SHARE = 0.9


def check_ranks(device: torch.device) -> None:
    """A small all-reduce, every GPU's free memory, and clocks that agree. All ranks call it.

    Raises:
        NodeError: on all ranks the same; names the nodes, which a requeued job will not get again.
    """
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones)
    total, world_size = float(ones.sum()), dist.get_world_size()
    # All ranks leave the collective within milliseconds: their clocks can be compared.
    mine = (node_name(), time.time(), _problem(device, total, world_size))
    answers: list = [None] * world_size
    dist.all_gather_object(answers, mine)
    problems = problems_of(answers)
    if not problems:
        return
    if dist.get_rank() == 0:
        for node, reason in problems:
            report(node, reason)
    raise NodeError("; ".join(f"node {node}: {reason}" for node, reason in problems))


def problems_of(answers: list[tuple[str, float, str]]) -> list[tuple[str, str]]:
    """(node, reason) of each fault in the ranks' (node, wall clock, problem) answers."""
    times_s = sorted(clock for _, clock, _ in answers)
    median_s = times_s[len(times_s) // 2]
    found = {}
    for node, clock_s, problem in answers:
        skew_s = clock_s - median_s
        if problem:
            found.setdefault(node, problem)
        elif abs(skew_s) > CLOCK_TOLERANCE_S:
            side = "ahead of" if skew_s > 0 else "behind"
            found.setdefault(node, f"its clock is {abs(skew_s):.0f} s {side} the other nodes'")
    return list(found.items())


def _problem(device: torch.device, total: float, world_size: int) -> str:
    """What is wrong with this rank; empty if nothing is."""
    if total != 1024.0 * world_size:
        return f"a sum over all ranks came out as {total:g}, not {1024 * world_size}"
    # Under SLURM a rank has its GPU to itself; elsewhere that is the user's affair.
    if device.type == "cuda" and LOGS_VARIABLE in os.environ:
        free, size = torch.cuda.mem_get_info(device)
        if free < FREE_MEMORY_SHARE * size:
            return (
                f"GPU {device.index} has {free / 2**30:.1f} of {size / 2**30:.1f} GiB free: "
                "another process uses it"
            )
    return ""
