"""`mixtron status`, `logs` and `cancel`: from SLURM and the run folder, without loading torch."""

import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from mixtron.launch.slurm import queue, run_folder
from mixtron.megatron_ext.errors import ConfigError

ENDS = {
    0: "finished",
    1: "failed (exit code 1): will not be restarted",
    2: "refused (exit code 2): mend what the log says and submit again",
    75: "stopped and saved (exit code 75): submit again to resume",
    76: "broken off (exit code 76): submit again to resume",
}


@dataclass(frozen=True)
class RunStatus:
    """What is known of one run."""

    run_dir: Path
    job: str
    state: str
    step: int
    steps: int
    loss: float | None
    tokens_per_s: float | None
    eta_s: float | None
    checkpoint: str
    restarts: int
    nodes: str
    note: str
    """A hang's verdict, or the batch shell's last word."""


def status_of(run_dir: Path, queued: list[queue.QueuedJob] | None = None) -> RunStatus:
    """Looks a run up.

    Raises:
        ConfigError: not a run folder.
    """
    refuse_other_folders(run_dir)
    jobs = run_folder.recorded_jobs(run_dir)
    job = jobs[-1]["job"] if jobs else ""
    names = {entry["job"] for entry in jobs}
    active = [j for j in (queue.queued_jobs() if queued is None else queued) if j.job in names]
    current = next((j for j in active if j.state != "PENDING"), active[0] if active else None)
    rows = [row for row in run_folder.last_rows(run_dir) if "train/loss" in row]
    last, steps = (rows[-1] if rows else {}), total_steps(run_dir)
    step = last.get("step", 0)
    seconds = [row["speed/step_s"] for row in rows[-20:] if "speed/step_s" in row]
    running = current is not None and current.state == "RUNNING"
    started = run_folder.launches(run_dir)
    of_job = [words for words in started if words[0].split(".")[0] == _plain_id(job, started)]
    return RunStatus(
        run_dir=run_dir,
        job=current.job if current else job,
        state=_state(run_dir, current, job),
        step=step,
        steps=steps,
        loss=last.get("train/loss"),
        tokens_per_s=last.get("speed/tokens_per_s") if running else None,
        eta_s=statistics.median(seconds) * max(steps - step, 0) if running and seconds else None,
        checkpoint=_checkpoint(run_dir),
        restarts=max(len(of_job) - 1, 0),
        nodes=current.nodes if current else (started[-1][2] if started else ""),
        note=_note(run_dir, started),
    )


def refuse_other_folders(run_dir: Path) -> None:
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"{run_dir}: not a run folder: there is no config.yaml")


def runs_of(folder: Path) -> list[Path]:
    """The runs of a sweep's folder; a run's own folder is the only one of its."""
    listing = folder / "runs.txt"
    return [Path(line) for line in listing.read_text().splitlines()] if listing.exists() else []


def total_steps(run_dir: Path) -> int:
    """`training.steps` of the resolved config, without loading all that checks one."""
    inside = False
    for line in (run_dir / "config.yaml").read_text().splitlines():
        if not line.startswith(" "):
            inside = line.startswith("training:")
        elif inside and line.strip().startswith("steps:"):
            return int(line.split(":")[1])
    raise ConfigError(f"{run_dir / 'config.yaml'}: no training.steps")


def lines_of(status: RunStatus) -> list[tuple[str, str]]:
    """Label and text of each line that a person sees."""
    lines = [("run", str(status.run_dir)), ("job", status.job or "none"), ("state", status.state)]
    loss = "" if status.loss is None else f", loss {status.loss:.4f}"
    lines.append(("step", f"{status.step:,} of {status.steps:,}{loss}"))
    if status.tokens_per_s is not None:
        eta = "" if status.eta_s is None else f", done in {duration(status.eta_s)}"
        lines.append(("speed", f"{status.tokens_per_s:,.0f} tokens/s{eta}"))
    lines.append(("checkpoint", status.checkpoint))
    lines.append(("restarts", str(status.restarts)))
    if status.nodes:
        lines.append(("nodes", status.nodes))
    if status.note:
        lines.append(("note", status.note))
    return lines


def duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s"


def log_files(run_dir: Path, rank: int | None) -> list[Path]:
    """The newest launch's log of one rank; or the batch shell's and rank 0's.

    Raises:
        ConfigError: nothing was started yet, or no such rank.
    """
    refuse_other_folders(run_dir)
    folder = run_dir / "slurm"
    started = run_folder.launches(run_dir)
    if not started:
        raise ConfigError(f"{run_dir}: no launch has begun yet; `mixtron status` says why")
    logs = folder / "logs" / started[-1][0]
    path = logs / f"rank_{rank or 0:05d}.log"
    if rank is not None:
        if not path.exists():
            ranks = sorted(int(p.stem.split("_")[1]) for p in logs.glob("rank_*.log"))
            known = f"ranks 0 to {ranks[-1]}" if ranks else "none yet"
            raise ConfigError(f"{logs}: no log of rank {rank}; it has {known}")
        return [path]
    return [p for p in [_batch_output(run_dir), *sorted(logs.glob("task_*.log")), path] if p]


def cancel(run_dir: Path, *, now: bool, patience_s: float) -> str:
    """Stops every job of a run; unless `now`, running ranks save first. Returns what became of it.

    Raises:
        SlurmError: SLURM refused.
        ConfigError: the ranks did not end in `patience_s`.
    """
    refuse_other_folders(run_dir)
    names = {entry["job"] for entry in run_folder.recorded_jobs(run_dir)}
    active = [job for job in queue.queued_jobs() if job.job in names]
    if not active:
        return "no job of this run waits or runs"
    (run_dir / "slurm" / "cancelled").touch()  # keeps the batch script from requeueing
    waiting = [job.job for job in active if job.state == "PENDING"]
    running = [job.job for job in active if job.state != "PENDING"]
    if waiting or now:
        queue.call("scancel", *waiting, *(running if now else []))
    deadline_s, next_signal_s = time.monotonic() + patience_s, 0.0
    while not now and running:
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"{run_dir}: job {', '.join(running)} has not ended in {patience_s:.0f} s; it was "
                "told to save and stop; `mixtron cancel --now` kills it"
            )
        if time.monotonic() > next_signal_s:  # again and again: tasks may only be starting
            with contextlib.suppress(queue.SlurmError):  # it may end at this moment
                queue.call("scancel", "--signal=USR1", *running)
            next_signal_s = time.monotonic() + 10
        time.sleep(0.5)
        left = {job.job for job in queue.queued_jobs()}
        running = [job for job in running if job in left]
    return f"cancelled; newest checkpoint: {_checkpoint(run_dir)}"


def _plain_id(job: str, started: list[list[str]]) -> str:
    """The id in launch names; SLURM gives elements of an array ids of their own."""
    return started[-1][0].split(".")[0] if "_" in job and started else job


def _state(run_dir: Path, current: queue.QueuedJob | None, job: str) -> str:
    if current is not None:
        if current.state == "RUNNING":
            return f"running, {current.time_left} left"
        return f"{current.state.lower()} ({current.reason})"
    end = run_folder.exit_code(run_dir)
    if end is not None:
        return ENDS.get(end[0], f"ended with exit code {end[0]}")
    if not job:
        return "never submitted"
    remembered = queue.ended_state(job)
    if run_folder.launches(run_dir):
        return ENDS[76] + (f"; SLURM says {remembered}" if remembered else "")
    return f"ended before it began; SLURM says {remembered or 'nothing'}"


def _checkpoint(run_dir: Path) -> str:
    newest = run_folder.newest_checkpoint(run_dir)
    return "none" if newest is None else f"{newest[0]}, {duration(newest[1])} old"


def _batch_output(run_dir: Path) -> Path | None:
    entry = run_folder.recorded_jobs(run_dir)[-1]
    path = Path(entry["script"]).parent / f"{entry['job']}.out"
    return path if path.exists() else None


def _note(run_dir: Path, started: list[list[str]]) -> str:
    if not started:
        return ""
    found = run_dir / "slurm" / "logs" / started[-1][0] / "hang" / "verdict"
    with contextlib.suppress(FileNotFoundError):
        return found.read_text().strip()
    output = _batch_output(run_dir)
    lines = output.read_text(errors="replace").splitlines() if output else []
    return lines[-1] if lines else ""
