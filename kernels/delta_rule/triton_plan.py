"""How the delta rule's kernels are cut and launched, by GPU: a table, no search at run time, which
would let ranks differ."""

from dataclasses import dataclass

import torch

from mixtron.kernels.triton_tools import architecture


@dataclass(frozen=True)
class Launch:
    """How one kernel is cut and launched."""

    warps: int
    stages: int = 1
    block_v: int = 128
    block_k: int = 128
    """Columns of values, and of keys, that a program takes at a time; no more than there are, and
    then a scan has as many fewer warps."""
    registers: int | None = None
    """Of a thread at most; None: as many as the compiler takes."""


@dataclass(frozen=True)
class Plan:
    prepare: Launch
    scan: Launch
    maps: Launch
    """Of the pieces of a sequence."""
    reverse: Launch
    pairs: Launch
    states: Launch
    gradient: Launch


PLANS = {
    80: Plan(
        prepare=Launch(warps=4),
        scan=Launch(warps=8, block_v=64),
        maps=Launch(warps=8, block_v=64),
        reverse=Launch(warps=8, block_v=64),
        pairs=Launch(warps=4, stages=2, block_v=64),
        states=Launch(warps=4, stages=2, block_v=64, block_k=64),
        gradient=Launch(warps=4, block_v=64, block_k=64),
    ),
    90: Plan(
        prepare=Launch(warps=4, registers=168),
        scan=Launch(warps=8, stages=3),
        maps=Launch(warps=4, stages=2, block_v=64, registers=168),
        reverse=Launch(warps=8, stages=3),
        pairs=Launch(warps=4, stages=2, block_v=64),
        states=Launch(warps=4, stages=3, block_v=64, block_k=64),
        gradient=Launch(warps=4, block_v=64, block_k=64),
    ),
}
"""By compute capability: an A100 (compiled for, not run on one), an H100 or H200."""


def launch_plan(device: torch.device) -> Plan:
    """
    Raises:
        ValueError: a GPU that no plan is for.
    """
    return PLANS[architecture(device)]
