"""The files of a run folder that rows of numbers are added to, read without torch."""

import json
from collections.abc import Iterator
from pathlib import Path

METRICS = "metrics.jsonl"
STARTS = "starts.jsonl"


def whole_rows(path: Path) -> Iterator[dict]:
    """Its rows in order, none where there is no file. Lines that a kill cut short are left out."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue
