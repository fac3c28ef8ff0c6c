"""What a profiler's trace says of a rank's communication: bytes sent, time that nothing hides."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mixtron.launch.traffic import ring

ELEMENT_BYTES = {
    "Bool": 1,
    "Byte": 1,
    "Char": 1,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
}


@dataclass
class Communication:
    """Of one rank; by kind, as `launch/traffic.py` has them."""

    sent_bytes: dict[str, float] = field(default_factory=dict)
    """Collectives counted as rings."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of NCCL's kernels: waiting for the other ranks is part of it."""
    exposed_s: dict[str, float] = field(default_factory=dict)
    """While no other kernel ran."""
    computing_s: float = 0.0
    """While other kernels ran."""
    unsized: dict[str, int] = field(default_factory=dict)
    """Kernels of NCCL that the trace gives no sizes for, or whose sizes mean nothing here: how many
    of each collective."""
    kernels_s: dict[str, float] = field(default_factory=dict)
    """The kernels that took the longest, all their launches together."""


def kind_of_group(description: str) -> str:
    """The kind of traffic of a process group, by the description that Megatron gives it."""
    if "DATA_PARALLEL" in description or "DISTRIBUTED_OPTIMIZER" in description:
        return "data"
    if "PIPELINE" in description or "EMBEDDING" in description:
        return "pipeline"
    if description.startswith("TENSOR"):
        return "tensor"
    return "context" if description.startswith("CONTEXT") else "other"


COLLECTIVES = (
    *("recv", "barrier", "send", "broadcast"),
    *("allreduce", "reducescatter", "alltoall", "allgather"),
)


def is_collective(name: str) -> bool:
    """Whether `ring_bytes` knows it."""
    return _plain(name).startswith(COLLECTIVES)


def ring_bytes(collective: str, sent: float, received: float, ranks: int) -> float:
    """What a rank sends, of a collective's input and output bytes, by torch's name for it.

    Raises:
        ValueError: a collective that is not known.
    """
    name = _plain(collective)
    if not is_collective(collective):
        raise ValueError(f"no such collective: {collective}")
    if ranks == 1 or name.startswith(("recv", "barrier")):
        return 0.0
    if name.startswith(("send", "broadcast")):
        return sent
    if name.startswith("allreduce"):
        return 2 * ring(ranks) * sent
    return ring(ranks) * (received if name.startswith("allgather") else sent)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def read_trace(path: Path) -> Communication:
    """Reads what `torch.profiler` exports for Chrome."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    nccl = [e for e in device if e["name"].startswith("nccl")]
    busy = Busy([e for e in device if not e["name"].startswith("nccl")])
    found = Communication(computing_s=busy.total / 1e6, kernels_s=longest(device))
    for event in nccl:
        arguments = event["args"]
        kind = kind_of_group(arguments.get("Process Group Description", ""))
        seconds = event["dur"] / 1e6
        _add(found.seconds, kind, seconds)
        _add(found.exposed_s, kind, seconds - busy.within(event["ts"], event["dur"]) / 1e6)
        name = arguments.get("Collective name", "")
        element = ELEMENT_BYTES.get(arguments.get("dtype"))
        if element is None or not is_collective(name):
            found.unsized[name] = found.unsized.get(name, 0) + 1
            continue
        sent, received = (element * arguments[f"{side} msg nelems"] for side in ("In", "Out"))
        _add(found.sent_bytes, kind, ring_bytes(name, sent, received, arguments["Group size"]))
    return found


def longest(events: list[dict], count: int = 12) -> dict[str, float]:
    """Seconds of the kernels that took the most, in order."""
    seconds: dict[str, float] = {}
    for event in events:
        _add(seconds, event["name"][:60], event["dur"] / 1e6)
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:count])


def _add(totals: dict[str, float], kind: str, value: float) -> None:
    totals[kind] = totals.get(kind, 0.0) + value


class Busy:
    """When any of some events of a trace ran."""

    def __init__(self, events: list[dict]):
        starts, ends = [], []
        for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)
        self.starts, self.ends = np.array(starts), np.array(ends)
        self.before = np.concatenate([[0.0], np.cumsum(self.ends - self.starts)])

    @property
    def total(self) -> float:
        return float(self.before[-1])

    def within(self, start: float, duration: float) -> float:
        return self._until(start + duration) - self._until(start)

    def _until(self, time: float) -> float:
        """Busy time before a point in time."""
        index = int(np.searchsorted(self.starts, time))
        over = max(self.ends[index - 1] - time, 0.0) if index else 0.0
        return float(self.before[index] - over)
