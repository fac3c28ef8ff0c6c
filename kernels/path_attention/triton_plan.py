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


SHARED_MEMORY_BYTES = 224 * 2**10
"""Of a block on an H100 or H200. The maps' kernels need up to 192 KiB."""
LARGE = Plan(
    tile=128,
    forward=Launch(block=64, warps=8, stages=3),
    keys=Launch(block=64, warps=8, stages=2),
    queries=Launch(block=64, warps=8, stages=2),
)
"""The fastest of those found right on an H200 (README.md has others' times)."""
SMALL = Plan(
    tile=128,
    forward=Launch(block=64, warps=8, stages=2),
    keys=Launch(block=64, warps=8, stages=2),
    queries=Launch(block=64, warps=8, stages=2),
)
"""148 KiB of shared memory when compiled for an H100, of an A100's 163; not run on one."""


def large(device: torch.device) -> bool:
    if device.type != "cuda":  # the interpreter
        return True
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin >= SHARED_MEMORY_BYTES


def launch_plan(device: torch.device) -> Plan:
    return LARGE if large(device) else SMALL
