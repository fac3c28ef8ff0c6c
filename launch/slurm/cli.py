"""`mixtron submit`, `status`, `logs` and `cancel`. None of them imports torch."""

import time
from pathlib import Path
from typing import Annotated

import typer

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
Cluster = Annotated[
    str | None,
    typer.Option(
        envvar="MIXTRON_CLUSTER", help="A profile of configs/clusters, by name, or a .yaml file."
    ),
]


def submit(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, as many as you like.")
    ] = None,
    cluster: Cluster = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Replaces slurm.nodes.")] = None,
    chain: Annotated[
        int, typer.Option(min=1, help="Jobs one after the other, where requeueing is forbidden.")
    ] = 1,
    sweep: Annotated[
        list[str] | None, typer.Option(help="key=a,b,c: one run each, as an array; repeat it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the script.")] = False,
) -> None:
    """Submit a run to SLURM; the job saves, requeues and resumes until the run is finished."""
    from mixtron.launch.slurm import submit as job

    planned = job.plan(config, overrides or [], cluster=cluster, nodes=nodes, sweeps=sweep)
    if dry_run:
        print(job.script_of(planned, chained=chain > 1), end="")
        return
    jobs = job.submit(planned, chain)
    slurm = planned.slurm
    print(f"job {', '.join(jobs)}: {slurm.nodes} nodes x {slurm.ranks_of_node} ranks")
    if planned.is_sweep:
        for number, run_dir in enumerate(planned.run_dirs):
            print(f"  {jobs[0]}_{number}  {run_dir}")
    print(f"run folder {planned.folder}\n  mixtron status {planned.folder}", end="")
    print(" | logs | cancel" if not planned.is_sweep else "")


def status(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run's or a sweep's folder.")
    ] = None,
) -> None:
    """Say how a run, a sweep, or every run in the queue is doing."""
    from mixtron.launch.slurm import queue
    from mixtron.launch.slurm.status import lines_of, runs_of, status_of

    queued = queue.queued_jobs()
    runs = runs_of(run) if run is not None else _queued_runs(queued)
    if run is not None and not runs:
        for label, text in lines_of(status_of(run, queued)):
            print(f"{label:<11}{text}")
        return
    if not runs:
        print("no run of yours waits or runs; `mixtron status RUN` looks one up")
        return
    rows = [("run", "job", "state", "step", "loss", "tokens/s", "restarts")]
    for run_dir in runs:
        s = status_of(run_dir, queued)
        loss = "" if s.loss is None else f"{s.loss:.4f}"
        speed = "" if s.tokens_per_s is None else f"{s.tokens_per_s:,.0f}"
        step = f"{s.step:,}/{s.steps:,}"
        rows.append(
            (str(run_dir), s.job, s.state.split(": ")[0], step, loss, speed, str(s.restarts))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _queued_runs(queued: list) -> list[Path]:
    """Folders of the runs, and of the sweeps' runs, that this user has in the queue."""
    from mixtron.launch.slurm.queue import COMMENT
    from mixtron.launch.slurm.status import runs_of

    folders = dict.fromkeys(
        Path(job.comment.removeprefix(COMMENT)) for job in queued if job.comment.startswith(COMMENT)
    )
    return [run for folder in folders for run in (runs_of(folder) or [folder])]


def logs(
    run: RunDir,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="How many last lines of each file.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Show the newest launch's logs: the batch script's, the tasks' and rank 0's; or one rank's."""
    from mixtron.launch.slurm.status import log_files

    paths = log_files(run, rank)
    for path in paths:
        if not path.exists() or not path.stat().st_size:
            continue
        if rank is None:
            print(f"==> {path} <==")
        print("\n".join(path.read_text(errors="replace").splitlines()[-lines:]))
    if follow:
        _follow(paths[-1])


def _follow(path: Path) -> None:
    with open(path, errors="replace") as file:
        file.seek(0, 2)
        while True:
            print(file.read(), end="", flush=True)
            time.sleep(0.5)


def cancel(
    run: RunDir,
    now: Annotated[bool, typer.Option("--now", help="Without saving.")] = False,
    patience_s: Annotated[float, typer.Option(min=1, help="For the ranks to save and end.")] = 600,
) -> None:
    """Stop a run's jobs; running ranks save first."""
    from mixtron.launch.slurm.status import cancel as cancel_run
    from mixtron.launch.slurm.status import runs_of

    for run_dir in runs_of(run) or [run]:
        print(f"{run_dir}: {cancel_run(run_dir, now=now, patience_s=patience_s)}")


def prep_submit(
    prefix: Annotated[Path, typer.Argument(help="Of a plan made by `mixtron prep plan`.")],
    cluster: Cluster = None,
    elements: Annotated[int, typer.Option(min=1, help="Array elements at most.")] = 16,
    workers: Annotated[int, typer.Option(min=1, help="Processes of an element.")] = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the script.")] = False,
) -> None:
    """Run a corpus plan as a SLURM array, then merge and verify; again: only what is left."""
    from mixtron.launch.slurm import prep
    from mixtron.launch.slurm.config import SlurmConfig, load_profile

    slurm = SlurmConfig.model_validate(load_profile(cluster) if cluster else {})
    planned = prep.plan(prefix, slurm, elements, workers)
    if dry_run:
        print(planned.script, end="")
        return
    *array, finish = prep.submit(planned)
    before = f"array {array[0]}: {len(planned.left)} elements, then " if array else ""
    done = planned.units - planned.units_left
    print(f"{before}job {finish}: merge and verify ({done} of {planned.units} units are done)")
    print(f"output in {planned.folder}")


def add_to(app: typer.Typer, prep: typer.Typer) -> None:
    """Adds these commands to `mixtron`, and `submit` to `mixtron prep`."""
    prep.command("submit")(prep_submit)
    for command in (submit, status, logs, cancel):
        app.command()(command)
