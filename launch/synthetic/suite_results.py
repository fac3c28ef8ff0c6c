"""Results of a suite's runs, a file each: present and complete, or not there."""

import hashlib
import json
from pathlib import Path

from mixtron.launch.synthetic.suite_config import Cell, SuiteConfig
from mixtron.launch.whole_files import replaced
from mixtron.megatron_ext.errors import ConfigError


def result_path(cell: Cell) -> Path:
    return cell.run_dir / "result.json"


def fingerprint(cell: Cell, suite: SuiteConfig) -> str:
    """Of all that a result depends on; where it is written does not count."""
    config = cell.config.model_dump(mode="json", exclude={"run_dir", "logging", "checkpoint"})
    settings = [setting.parameters for setting in cell.settings]
    text = json.dumps([config, settings, suite.sequences], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_result(cell: Cell, suite: SuiteConfig, rows: list[dict], seconds: float) -> None:
    content = {
        "fingerprint": fingerprint(cell, suite),
        "task": cell.task,
        "size": cell.size,
        "model": cell.model,
        "seed": cell.seed,
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    with replaced(result_path(cell)) as file:
        file.write_text(json.dumps(content, indent=1) + "\n")


def has_result(cell: Cell, suite: SuiteConfig) -> bool:
    """Whether the run is done.

    Raises:
        ConfigError: it was done with another configuration.
    """
    return _read(cell, suite) is not None


def read_results(cells: list[Cell], suite: SuiteConfig) -> list[dict]:
    """Of the runs that are done."""
    found = [_read(cell, suite) for cell in cells]
    return [result for result in found if result is not None]


def _read(cell: Cell, suite: SuiteConfig) -> dict | None:
    path = result_path(cell)
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    if result["fingerprint"] != fingerprint(cell, suite):
        raise ConfigError(
            f"{path}: made with another configuration of this suite; remove {cell.run_dir}, or "
            "give another --dir"
        )
    return result
