"""`mixtron prep submit`: a corpus plan as a job array, then a job that merges and verifies."""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from mixtron.data_prep.errors import DataError
from mixtron.launch.slurm import queue
from mixtron.launch.slurm.config import SlurmConfig
from mixtron.launch.slurm.script import render


@dataclass(frozen=True)
class PrepSubmission:
    """The elements of a plan that are left to do."""

    prefix: Path
    elements: int
    left: list[int]
    script: str

    @property
    def folder(self) -> Path:
        return slurm_folder(self.prefix)


def slurm_folder(prefix: Path) -> Path:
    """`PREFIX.slurm`: the script, the elements' output, and `done_N` of each finished element."""
    return Path(f"{prefix}.slurm")


def plan(prefix: Path, slurm: SlurmConfig, elements: int, workers: int) -> PrepSubmission:
    """What would be submitted. Elements that ended well since the plan was made are left out.

    Raises:
        DataError: no plan at `prefix`.
    """
    prefix = prefix.absolute()
    path = Path(f"{prefix}.plan.json")
    try:
        units = len(json.loads(path.read_text())["units"])
    except FileNotFoundError:
        raise DataError(f"{path}: no such plan; make it with `mixtron prep plan`") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path}: not a plan of `mixtron prep plan`") from None
    folder = slurm_folder(prefix)
    elements = max(1, min(elements, units))
    recorded = folder / "elements"
    if recorded.exists() and recorded.stat().st_mtime_ns > path.stat().st_mtime_ns:
        elements = int(recorded.read_text())  # so that what is done is still the same share
    left = [i for i in range(elements) if not _is_done(folder / f"done_{i}", path)]
    script = render(
        "prep.sh.j2",
        slurm=slurm,
        prefix=str(prefix),
        folder=str(folder),
        elements=elements,
        workers=workers,
        python=slurm.python or sys.executable,
        comment=shlex.quote(f"mixtron prep {prefix}"),
        working_dir=shlex.quote(str(Path.cwd())),
        output=shlex.quote(f"{folder}/%A_%a.out"),
    )
    return PrepSubmission(prefix, elements, left, script)


def submit(planned: PrepSubmission) -> list[str]:
    """Submits the array, if an element is left, and the job that merges; returns their ids.

    Raises:
        SlurmError: sbatch refused, or jobs of this plan still wait or run.
    """
    comment = f"mixtron prep {planned.prefix}"
    active = [job for job in queue.queued_jobs() if job.comment == comment]
    if active:
        raise queue.SlurmError(
            f"{planned.prefix}: job {active[0].job} of it is {active[0].state} ({active[0].reason})"
            "; wait for it, or scancel it"
        )
    planned.folder.mkdir(parents=True, exist_ok=True)
    (planned.folder / "elements").write_text(f"{planned.elements}\n")
    script = planned.folder / "prep.sh"
    script.write_text(planned.script)
    script.chmod(0o755)
    jobs, after = [], []
    if planned.left:
        indices = ",".join(map(str, planned.left))
        jobs.append(queue.sbatch(script, f"--array={indices}"))
        after = [f"--dependency=afterok:{jobs[0]}", "--kill-on-invalid-dep=yes"]
    options = [*after, f"--output={planned.folder}/finish_%j.out", "--job-name=prep-finish"]
    jobs.append(queue.sbatch(script, *options, arguments=["finish"]))
    return jobs


def _is_done(mark: Path, plan_path: Path) -> bool:
    return mark.exists() and mark.stat().st_mtime_ns > plan_path.stat().st_mtime_ns
