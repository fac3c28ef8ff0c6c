"""Bad lines of all units in one file, with their line numbers in the input."""

import json
import os
from collections import defaultdict
from pathlib import Path

from mixtron.data_prep.files import flush_to_disk, remove_leftovers, sync_folder, temporary_name
from mixtron.data_prep.plan import Plan
from mixtron.data_prep.unit import Receipt, unit_path


def write_rejected(plan: Plan, receipts: dict[str, Receipt], folder: Path, path: Path) -> None:
    """Writes `path`, one JSON object a bad line: `file`, `line` (or row), `reason`, `raw`.

    The line is null where a whole file is bad. Nothing is written when there are none.
    """
    remove_leftovers(path)
    if not any(receipts[unit.key].rejected for unit in plan.units):
        return
    temporary = temporary_name(path)
    lines_before: dict[str, int] = defaultdict(int)
    with open(temporary, "x", encoding="utf-8") as out:
        for unit in plan.units:
            receipt = receipts[unit.key]
            with open(unit_path(folder, unit.key, "rejected"), encoding="utf-8") as entries:
                for content in entries:
                    entry = json.loads(content)
                    line = entry["line"]
                    entry["line"] = line + lines_before[entry["file"]] if line else None
                    out.write(json.dumps(entry, ensure_ascii=False) + "\n")
            for piece in receipt.pieces:
                lines_before[piece["file"]] += piece["lines"]
        flush_to_disk(out)
    os.replace(temporary, path)
    sync_folder(path.parent)
