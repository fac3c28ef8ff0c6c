"""Nodes that a requeued job shall not get again."""

import os
import re

HARDWARE_FAULT = re.compile(
    r"uncorrectable ECC|fallen off the bus|unable to determine the device handle|NVLink error"
    r"|misaligned or corrupted.*hardware|hardware stack error",
    re.IGNORECASE,
)


class NodeError(Exception):
    """A node that cannot run its ranks. Elsewhere the job may well run."""

    exit_code = 76


def node_name() -> str:
    """This node as SLURM calls it; elsewhere its host name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def report(node: str, reason: str) -> None:
    """Has the batch script exclude `node` when it requeues the job: it looks for this line."""
    print(f"mixtron: bad node {node}: {' '.join(reason.split())}", flush=True)


def report_hardware_fault(error: BaseException) -> None:
    """Reports this node if `error` speaks of broken hardware, not of a fault in a program."""
    if HARDWARE_FAULT.search(str(error)):
        report(node_name(), str(error))
