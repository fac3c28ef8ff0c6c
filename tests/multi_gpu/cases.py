"""What a part is made of: named cases, their outcomes, and the file that outcomes are kept in."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mixtron.launch.lifetime import die_with_parent

CASE_LIMIT_S = 90
"""A first step compiles a dozen kernels, of PaTH's for 20 s and longer beside other processes."""
Values = dict[str, object]
"""What a case measured, as JSON."""


@dataclass(frozen=True)
class Options:
    """What every case is told."""

    gpus: int
    device: str
    """cuda, or cpu: the debug models on gloo, to try the script out."""
    out: Path
    parts: tuple[str, ...] = ()
    """To be run by ranks, in order."""
    only: str = ""
    """A pattern in the names of the cases to run."""
    until_s: float = float("inf")
    """No case begins after this time, in seconds since the epoch."""
    part_limits_s: dict[str, float] = field(default_factory=dict)
    """No case of a part begins later than this after the part's first."""

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def under_way(self) -> Path:
        """Names part and case that the ranks are at."""
        return self.out / "under_way.json"

    def busy(self, name: str) -> Path:
        """There as long as other processes use the GPUs."""
        return self.out / f"busy-{name}"


class Differs(AssertionError):
    """What was compared differs; the ranks themselves are sound and may go on."""


@dataclass(frozen=True)
class Case:
    """`run` raises if what it checks does not hold."""

    name: str
    run: Callable[[], Values]
    alone: bool = False
    """Every rank runs it in a world of its own, without the others."""


@dataclass
class Outcome:
    part: str
    case: str
    passed: bool
    seconds: float = 0.0
    error: str = ""
    values: list[Values] = field(default_factory=list)
    """By rank."""


def add(path: Path, outcome: Outcome) -> None:
    # In one write: several processes add to it.
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(asdict(outcome)) + "\n").encode())


def read(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """A process in a session of its own, which ends with the thread that starts it."""
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGKILL),
    )


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()
