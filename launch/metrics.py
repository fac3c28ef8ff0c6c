"""What a person sees of a run: a line a step, metrics.jsonl, TensorBoard."""

import json
import math
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from mixtron.launch.metrics_files import METRICS, STARTS, whole_rows
from mixtron.launch.whole_files import replaced


class Metrics:
    """Written by rank 0 alone. A resume drops everything later than the resumed step."""

    def __init__(self, run_dir: Path, *, first_step: int, total_steps: int, tensorboard: bool):
        self.total_steps = total_steps
        self._path = run_dir / METRICS
        reached = _drop_later_lines(self._path, first_step)
        _record_start(run_dir / STARTS, first_step - 1, reached)
        self._file = open(self._path, "a", buffering=1)  # noqa: SIM115
        self._board = (
            SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)
            if tensorboard
            else None
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _drop_later_lines(path: Path, first_step: int) -> int:
    """Keeps whole lines of steps before `first_step`; a line that a kill cut short goes too.

    Returns:
        The last step that was logged before; 0 where nothing was.
    """
    if not path.exists():
        return 0
    kept, reached = [], 0
    for row in whole_rows(path):
        reached = max(reached, row["step"])
        if row["step"] < first_step:
            kept.append(json.dumps(row))
    with replaced(path) as file:
        file.write_text("".join(f"{line}\n" for line in kept))
    return reached


def _record_start(path: Path, after_step: int, reached_step: int) -> None:
    """A line each time that training begins or goes on, for reports: the rest is never dropped."""
    start = {"time": time.time(), "after_step": after_step, "reached_step": reached_step}
    with path.open("a") as file:
        file.write(json.dumps(start) + "\n")


def step_line(step: int, total_steps: int, values: dict[str, float]) -> str:
    """One readable line."""
    parts = [
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {values['train/loss']:.4f}",
        f"lr {values['train/lr']:.2e}",
        f"grad norm {values['train/grad_norm']:.3f}",
        f"{values['speed/tokens_per_s']:,.0f} tok/s",
        f"{values['speed/tflops_per_gpu']:.2f} TFLOP/s",
    ]
    if "speed/mfu" in values:
        parts.append(f"MFU {100 * values['speed/mfu']:.1f} %")
    parts.append(f"{values['memory/peak_gib']:.2f} GiB")
    if values["train/skipped_steps"]:
        parts.append(f"skipped {values['train/skipped_steps']:.0f}")
    if not math.isfinite(values["train/loss"]):
        parts.append("NOT FINITE, step skipped")
    return " | ".join(parts)
