"""`mixtron submit`: checks, run folder, batch script, sbatch."""

import itertools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixtron.launch.config import RunConfig, dump_config, load_config
from mixtron.launch.slurm import queue, run_folder
from mixtron.launch.slurm.checks import check_job
from mixtron.launch.slurm.config import SlurmConfig, load_profile
from mixtron.launch.slurm.script import job_script
from mixtron.launch.whole_files import replaced
from mixtron.megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class Submission:
    """One sbatch: a run, or an array of runs with one script."""

    folder: Path
    """The run's folder, or the sweep's, which holds the runs' folders."""
    runs: list[RunConfig]
    slurm: SlurmConfig
    is_sweep: bool

    @property
    def run_dirs(self) -> list[Path]:
        return [Path(run.run_dir) for run in self.runs]


def plan(
    config_path: Path,
    overrides: list[str],
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    sweeps: list[str] | None = None,
) -> Submission:
    """Loads and checks what would be submitted.

    Raises:
        ConfigError, DataError: one line each, of whichever run of a sweep.
    """
    profile = load_profile(cluster) if cluster else None
    if nodes is not None:
        overrides = [*overrides, f"slurm.nodes={nodes}"]
    folder = Path(load_config(config_path, overrides, profile).run_dir).absolute()
    runs = []
    for point in sweep_points(sweeps or []):
        config = load_config(config_path, overrides + point, profile)
        run_dir = folder / ",".join(point).replace("/", "_") if point else folder
        config = config.model_copy(update={"run_dir": str(run_dir)})
        slurm = check_job(config)
        runs.append(config)
    return Submission(folder, runs, slurm, is_sweep=bool(sweeps))


def sweep_points(sweeps: list[str]) -> list[list[str]]:
    """Every combination of `key=a,b,c` arguments, each as a list of overrides.

    Commas inside brackets and braces do not separate values.
    """
    axes = []
    for sweep in sweeps:
        key, separator, values = sweep.partition("=")
        choices = _split_outside_brackets(values)
        if not separator or not key or not all(choices):
            raise ConfigError(f"--sweep {sweep}: expected key.path=value,value,...")
        if key.split(".")[0] in ("slurm", "run_dir"):
            raise ConfigError(f"--sweep {sweep}: the runs of one array share {key}; submit twice")
        if len(set(choices)) < len(choices):
            raise ConfigError(f"--sweep {sweep}: a value twice")
        axes.append([f"{key}={value}" for value in choices])
    return [list(point) for point in itertools.product(*axes)]


def script_of(submission: Submission, *, chained: bool) -> str:
    return job_script(
        submission.runs[0].name,
        submission.slurm,
        submission.folder,
        working_dir=Path.cwd(),
        array_size=len(submission.runs) if submission.is_sweep else 0,
        chained=chained,
    )


def submit(submission: Submission, chain: int = 1) -> list[str]:
    """Writes the run folders and submits; returns the jobs' ids, `chain` of them.

    Raises:
        ConfigError: a job of one of the runs still waits or runs.
        SlurmError: sbatch refused.
    """
    refuse_active(submission)
    script = write_folders(submission, script_of(submission, chained=chain > 1))
    jobs: list[str] = []
    for link in range(1, chain + 1):
        options = [f"--export=ALL,MIXTRON_CHAIN_LINK={link}"] if chain > 1 else []
        if jobs:
            options.append(f"--dependency=afterany:{jobs[-1]}")
        jobs.append(queue.sbatch(script, *options))
        for number, run_dir in enumerate(submission.run_dirs):
            element = f"{jobs[-1]}_{number}" if submission.is_sweep else jobs[-1]
            run_folder.record_job(run_dir, element, script)
    return jobs


def refuse_active(submission: Submission) -> None:
    """Two jobs on one run folder would only wait for each other."""
    active: dict[str, Any] = {job.job: job for job in queue.queued_jobs()}
    for run_dir in submission.run_dirs:
        for entry in run_folder.recorded_jobs(run_dir):
            if entry["job"] in active:
                raise ConfigError(
                    f"run_dir={run_dir}: job {entry['job']} of this run is "
                    f"{active[entry['job']].state}; it resumes by itself: `mixtron status "
                    f"{shlex.quote(str(run_dir))}`, or `mixtron cancel` it first"
                )


def write_folders(submission: Submission, text: str) -> Path:
    """Resolved configs, code, environment and script; returns the script's path."""
    for config, run_dir in zip(submission.runs, submission.run_dirs, strict=True):
        folder = run_folder.slurm_folder(run_dir)
        (folder / "cancelled").unlink(missing_ok=True)
        dump_config(config, run_dir / "config.yaml")
    folder = run_folder.slurm_folder(submission.folder)
    if submission.is_sweep:
        lines = "".join(f"{run_dir}\n" for run_dir in submission.run_dirs)
        with replaced(submission.folder / "runs.txt") as file:
            file.write_text(lines)
    run_folder.snapshot_code(submission.folder)
    run_folder.list_environment(submission.folder)
    script = folder / "job.sh"
    script.write_text(text)
    script.chmod(0o755)
    return script


def _split_outside_brackets(text: str) -> list[str]:
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return values
