"""What a submission leaves in a run folder, and what a look at it finds there."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

CODE_ROOTS = ("launch", "megatron_ext", "kernels", "data_prep", "slurm")
CODE_SUFFIXES = (".py", ".j2")


def slurm_folder(run_dir: Path) -> Path:
    """`<run>/slurm`: job.sh, jobs.jsonl, launches, logs/<launch>/, the batch shells' output."""
    folder = run_dir / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def snapshot_code(folder: Path) -> str:
    """Copies the package to `folder`/code, which the job runs; returns one line on its version."""
    code = folder / "code"
    temporary = folder / f".code.{os.getpid()}.tmp"
    for root in CODE_ROOTS:
        source = Path(next(iter(find_spec(f"mixtron.{root}").submodule_search_locations)))  # type: ignore[union-attr,arg-type]
        for path in source.rglob("*"):
            if path.suffix in CODE_SUFFIXES:
                target = temporary / "mixtron" / root / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    version, changes = _git_version(Path(__file__).parents[2])
    (temporary / "VERSION").write_text(version + "\n")
    (temporary / "changes.diff").write_text(changes)
    shutil.rmtree(code, ignore_errors=True)
    os.rename(temporary, code)
    return version


def list_environment(folder: Path) -> None:
    """Writes interpreter, packages and modules to `folder`/environment.txt."""
    packages = sorted({f"{d.metadata['Name']}=={d.version}" for d in distributions()})
    lines = [
        f"python {sys.version.split()[0]} {sys.executable}",
        f"host {os.uname().nodename} {os.uname().release}",
        f"modules {os.environ.get('LOADEDMODULES', '')}",
        *packages,
    ]
    (folder / "environment.txt").write_text("\n".join(lines) + "\n")


def record_job(run_dir: Path, job: str, script: Path) -> None:
    entry = {"job": job, "time": time.time(), "script": str(script)}
    with open(slurm_folder(run_dir) / "jobs.jsonl", "a") as file:
        file.write(json.dumps(entry) + "\n")


def recorded_jobs(run_dir: Path) -> list[dict]:
    """Every submission of this run, oldest first."""
    path = run_dir / "slurm" / "jobs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def launches(run_dir: Path) -> list[list[str]]:
    """Launch, checkpoint it began from, nodes, Unix time: of each start, oldest first."""
    path = run_dir / "slurm" / "launches"
    lines = path.read_text().splitlines() if path.exists() else []
    return [words for line in lines if len(words := line.split()) == 4]


def last_rows(run_dir: Path, bytes_read: int = 1 << 16) -> list[dict]:
    """The newest lines of metrics.jsonl, without reading the rest."""
    with contextlib.suppress(FileNotFoundError), open(run_dir / "metrics.jsonl", "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - bytes_read))
        rows = []
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return [row for row in rows if isinstance(row, dict)]
    return []


def newest_checkpoint(run_dir: Path) -> tuple[str, float] | None:
    """Name and age in seconds."""
    latest = run_dir / "checkpoints" / "latest"
    with contextlib.suppress(FileNotFoundError):
        return latest.read_text().strip(), time.time() - latest.stat().st_mtime
    return None


def exit_code(run_dir: Path) -> tuple[int, str] | None:
    """Exit code and launch that the run's last end left, if any."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
        content = json.loads((run_dir / "exit.json").read_text())
        return content["exit_code"], content["launch"]
    return None


def _git_version(checkout: Path) -> tuple[str, str]:
    """One line, and what is not committed; empty outside a checkout."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(checkout), *arguments]
        with contextlib.suppress(FileNotFoundError):
            answer = subprocess.run(command, capture_output=True, text=True)
            return answer.stdout if answer.returncode == 0 else None
        return None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return "not from a git checkout", ""
    changes = git("diff", "HEAD") or ""
    return commit.strip() + (" with changes that are not committed" if changes else ""), changes
