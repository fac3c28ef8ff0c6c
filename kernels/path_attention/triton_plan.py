"""How the kernels are cut and launched, by GPU: a table, no search at run time, which would let
ranks differ."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    block: int
    """Tokens that are walked over at a time."""
    warps: int
    stages: int


@dataclass(frozen=True)
class Plan:
    tile: int
    """Tokens that one program owns; with maps also those of a UT transform."""
    forward: Launch
    keys: Launch
    queries: Launch


def launch_plan(device: torch.device) -> Plan:
    return Plan(
        tile=128,
        forward=Launch(block=64, warps=8, stages=3),
        keys=Launch(block=64, warps=8, stages=2),
        queries=Launch(block=64, warps=8, stages=3),
    )
