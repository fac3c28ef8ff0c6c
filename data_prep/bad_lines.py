"""What happens to a line that is not a document."""

import json
import os
from pathlib import Path
from typing import IO, Literal

from mixtron.data_prep.errors import DataError
from mixtron.data_prep.files import flush_to_disk, temporary_name
from mixtron.data_prep.readers import LineRange, Rejected, Unit

OnBadLine = Literal["fail", "skip", "quarantine"]


class BadLines:
    """Applies the policy to bad lines; as a context manager it removes what was not published.

    Args:
        policy: `fail` stops at the first; `skip` counts; `quarantine` also writes them down.
        path: under `quarantine`, where bad lines go, one JSON object a line.
    """

    def __init__(self, policy: OnBadLine, path: Path = Path("rejected.jsonl")) -> None:
        self.count = 0
        self._policy, self._path = policy, path
        self._temporary = temporary_name(path)
        self._quarantine: IO[str] | None = None
        self._file, self._lines_before = "", 0

    def __enter__(self) -> "BadLines":
        return self

    def __exit__(self, *_: object) -> None:
        if self._quarantine is not None:
            self._quarantine.close()
            self._temporary.unlink(missing_ok=True)

    def take(self, unit: Unit, rejected: list[Rejected], lines: int) -> None:
        """Takes note of one unit; units come in the order of the input.

        Args:
            rejected: bad lines, numbered within the unit.
            lines: all lines of the unit.

        Raises:
            DataError: under `fail`, at the first bad line.
        """
        if isinstance(unit, LineRange) and unit.file != self._file:
            self._file, self._lines_before = unit.file, 0
        for bad in rejected:
            self.count += 1
            line = None if bad.line is None else self._lines_before + bad.line
            if self._policy == "fail":
                where = bad.file if line is None else f"{bad.file}:{line}"
                raise DataError(f"{where}: {bad.reason}")
            if self._policy == "quarantine":
                self._keep(bad, line)
        self._lines_before += lines

    def publish(self) -> None:
        """Gives the quarantined lines their name."""
        if self._quarantine is not None:
            flush_to_disk(self._quarantine)
            os.replace(self._temporary, self._path)

    def _keep(self, bad: Rejected, line: int | None) -> None:
        if self._quarantine is None:
            self._quarantine = open(self._temporary, "x", encoding="utf-8")  # noqa: SIM115
        entry = {"file": bad.file, "line": line, "reason": bad.reason, "raw": bad.raw}
        self._quarantine.write(json.dumps(entry, ensure_ascii=False) + "\n")
