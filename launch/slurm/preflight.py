"""What each node is asked before its ranks start, and where all tasks of a job meet.

Every task writes `<logs>/arrived/task_N.json` into the run folder and waits for all others': a node
that has no such folder, or another one, is found by name and not by a time-out in NCCL.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from mixtron.launch.config import RunConfig
from mixtron.launch.slurm.bad_nodes import NodeError, report
from mixtron.launch.slurm.hangs import write_json
from mixtron.launch.slurm.hostlist import count_of
from mixtron.launch.slurm.task import Task
from mixtron.launch.validate import checkpoint_bytes
from mixtron.megatron_ext.errors import ConfigError

TOKEN = "token"
"""Written by the batch script into the logs folder: the launch's name."""
SHARED_S = 60.0
"""For a file written on one node to be seen on another."""
ARRIVAL_S = 600.0
"""For the last task to start: a node may have a container to unpack."""
MIN_SCRATCH_BYTES = 1 << 30


def meet(task: Task, logs: Path, config: RunConfig) -> int:
    """Checks this node, waits for all tasks, and returns the port that the first one chose.

    Raises:
        NodeError: on all tasks the same; names the nodes.
        ConfigError: the job has fewer GPUs than the config says.
    """
    assert config.slurm is not None
    check_allotment(os.environ, config.slurm.gpus_per_node)
    missing = check_shared(logs / TOKEN, task.launch)
    if missing:  # what this task writes there, none would read
        report(task.node, missing)
        raise NodeError(f"node {task.node}: {missing}")
    if few := few_cpus(config.slurm.ranks_of_node // config.slurm.tasks):
        print(f"mixtron: node {task.node}: {few}", flush=True)
    arrival = {"node": task.node, "port": 0, "problem": check_node(task, config)}
    if task.task == 0:
        arrival["port"] = free_port(task.job_id, config.slurm.port_range)
    folder = logs / "arrived"
    folder.mkdir(exist_ok=True)
    write_json(folder / f"task_{task.task:05d}.json", arrival)
    arrivals = _wait_for_all(task, folder)
    problems = {a["node"]: a["problem"] for a in arrivals if a["problem"]}
    if problems:
        for node, reason in problems.items():
            report(node, reason)  # by every task: srun kills the others when the first one ends
        raise NodeError("; ".join(f"node {node}: {reason}" for node, reason in problems.items()))
    return arrivals[0]["port"]


def _wait_for_all(task: Task, folder: Path) -> list[dict]:
    """The arrivals of all tasks, by task; one that never comes is a problem of its node."""
    deadline_s = time.monotonic() + ARRIVAL_S
    paths = [folder / f"task_{number:05d}.json" for number in range(task.tasks)]
    while not all(path.exists() for path in paths) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    a_node = task.tasks // len(task.nodes)
    return [
        json.loads(path.read_text())
        if path.exists()
        else {"node": task.nodes[number // a_node], "port": 0, "problem": "its task never started"}
        for number, path in enumerate(paths)
    ]


def check_node(task: Task, config: RunConfig) -> str:
    """What keeps this node from running its ranks; empty if nothing does."""
    if task.local_task != 0:
        return ""  # the node's first task looks for all
    slurm, scratch = config.slurm, Path(os.environ["MIXTRON_SCRATCH"])
    assert slurm is not None
    if shutil.disk_usage(scratch).free < MIN_SCRATCH_BYTES:
        return f"less than 1 GiB is free in slurm.scratch_dir={slurm.scratch_dir}"
    free, needed = shutil.disk_usage(config.run_dir).free, checkpoint_bytes(config)
    if free < needed:
        return f"run_dir: {free / 2**30:.1f} GiB are free, a checkpoint takes {needed / 2**30:.1f}"
    return check_gpus(slurm.gpus_per_node) if slurm.gpus_per_node else ""


def check_shared(token: Path, launch: str) -> str:
    """The run folder must be the one that the batch script sees on the first node."""
    deadline_s = time.monotonic() + SHARED_S
    while time.monotonic() < deadline_s:
        try:
            if token.read_text().strip() == launch:
                return ""
        except FileNotFoundError:
            pass
        except OSError as error:
            return f"{token}: {error.strerror}"
        time.sleep(0.5)
    return f"run_dir is not shared with the first node: {token} is not there"


def check_allotment(environment: Mapping[str, str], expected: int) -> None:
    """Raises ConfigError when SLURM gave this node fewer GPUs than the run's config counts on."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        given = count_of(environment.get(name))
        if given is not None and given < expected:
            raise ConfigError(
                f"slurm.gpus_per_node={expected}, but {name}={environment[name]}: submit with "
                "`mixtron submit`, which asks for them"
            )


def few_cpus(ranks: int) -> str:
    """A warning if this task's ranks must share CPUs, which its own binding says; else empty."""
    cpus = len(os.sched_getaffinity(0))
    if cpus >= ranks:
        return ""
    return f"{ranks} ranks share {cpus} CPUs, which slows them: set slurm.cpus_per_task"


def check_gpus(expected: int) -> str:
    """Counts the GPUs that answer, and their memory errors."""
    query = "index,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return f"nvidia-smi is not there, but slurm.gpus_per_node={expected}"
    except subprocess.TimeoutExpired:
        return "nvidia-smi did not answer in 60 s"
    if answer.returncode != 0:
        return f"nvidia-smi: {' '.join((answer.stdout + answer.stderr).split())}"
    rows = [line.split(",") for line in answer.stdout.splitlines() if line.strip()]
    if len(rows) < expected:
        return f"{len(rows)} GPUs visible, slurm.gpus_per_node={expected}"
    for index, errors in rows:
        if errors.strip().isdigit() and int(errors) > 0:
            return f"GPU {index.strip()} has {errors.strip()} uncorrected memory errors"
    return ""


def first_port(job_id: int, port_range: list[int]) -> int:
    """Jobs with neighbouring ids, which may share a node, try different ports first."""
    first, last = port_range
    return first + job_id % (last - first + 1)


def free_port(job_id: int, port_range: list[int]) -> int:
    """A port of the range that nothing on this node uses, and that is this job's own if it can be.

    Raises:
        NodeError: all are in use.
    """
    first, last = port_range
    start = first_port(job_id, port_range)
    for port in [*range(start, last + 1), *range(first, start)]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError:
                continue
            overlap = ephemeral_overlap(port_range)
            if overlap:
                print(f"mixtron: {overlap}", flush=True)
            return port
    raise NodeError(f"slurm.port_range={port_range}: no free port")


def ephemeral_overlap(
    port_range: list[int],
    source: Path = Path("/proc/sys/net/ipv4/ip_local_port_range"),
) -> str:
    """A warning if this machine gives ports of the range to outgoing connections; else empty."""
    try:
        low, high = map(int, source.read_text().split())
    except (OSError, ValueError):
        return ""
    first, last = port_range
    if last < low or first > high:
        return ""
    return (
        f"slurm.port_range={port_range} overlaps the ephemeral ports {low}-{high} of "
        f"{os.uname().nodename}: another program may take the port; choose a range outside them"
    )
