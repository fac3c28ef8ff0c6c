"""What a part is made of: named cases, their outcomes, and the file that outcomes are kept in."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

CASE_LIMIT_S = 75
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

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def under_way(self) -> Path:
        """Names part and case that the ranks are at."""
        return self.out / "under_way.json"


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
    with path.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
