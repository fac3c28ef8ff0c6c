"""`mixtron prep submit`: a corpus plan as a job array, then a job that merges and verifies."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from mixtron.data_prep.outputs import all_made, outputs_of
from mixtron.data_prep.plan import load_plan
from mixtron.data_prep.run import receipts_of
from mixtron.launch.slurm import queue
from mixtron.launch.slurm.config import SlurmConfig
from mixtron.launch.slurm.script import render


@dataclass(frozen=True)
class PrepSubmission:
    """What is left to do of a plan."""

    prefix: Path
    units: int
    units_left: int
    elements: int
    """Among which the units are shared out."""
    left: list[int]
    """The elements that have a unit to do."""
    script: str

    @property
    def folder(self) -> Path:
        """The script and the jobs' output."""
        return Path(f"{self.prefix}.slurm")


def plan(prefix: Path, slurm: SlurmConfig, elements: int, workers: int) -> PrepSubmission:
    """What would be submitted: units with a receipt are done, whoever did them.

    Raises:
        DataError: no plan at `prefix`.
    """
    prefix = prefix.absolute()
    planned = load_plan(prefix)
    receipts = receipts_of(planned, prefix)
    missing = [i for i, unit in enumerate(planned.units) if unit.key not in receipts]
    if all_made(planned, prefix):
        missing = []
    elements = max(1, min(elements, len(planned.units)))
    script = render(
        "prep.sh.j2",
        slurm=slurm,
        prefix=str(prefix),
        shards=[output.prefix for output in outputs_of(planned, prefix)],
        elements=elements,
        workers=workers,
        python=slurm.python or sys.executable,
        comment=shlex.quote(_comment(prefix)),
        working_dir=shlex.quote(str(Path.cwd())),
        output=shlex.quote(f"{prefix}.slurm/%A_%a.out"),
    )
    left = sorted({i % elements for i in missing})
    return PrepSubmission(prefix, len(planned.units), len(missing), elements, left, script)


def submit(planned: PrepSubmission) -> list[str]:
    """Submits the array, if an element is left, and the job that merges; returns their ids.

    Raises:
        SlurmError: sbatch refused, or jobs of this plan still wait or run.
    """
    active = [job for job in queue.queued_jobs() if job.comment == _comment(planned.prefix)]
    if active:
        raise queue.SlurmError(
            f"{planned.prefix}: job {active[0].job} of it is {active[0].state} ({active[0].reason})"
            "; wait for it, or scancel it"
        )
    planned.folder.mkdir(parents=True, exist_ok=True)
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


def _comment(prefix: Path) -> str:
    return f"mixtron-prep {prefix}"
