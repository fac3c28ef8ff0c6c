"""What srun runs in each task: checks the node, starts its rank or ranks, and watches over them.

Everything that differs between tasks is read here, from the task's own environment; the batch
script expands none of it.
"""

import contextlib
import os
import shutil
import socket
import sys
import traceback
from pathlib import Path

from mixtron.launch import exit_codes
from mixtron.launch.heartbeat import HEARTBEATS_VARIABLE, LOGS_VARIABLE
from mixtron.launch.slurm.hangs import NCCL_PIPE
from mixtron.launch.slurm.supervisor import Supervisor
from mixtron.launch.slurm.task import Task
from mixtron.megatron_ext.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Run as `python -m ... CONFIG [--debug]`; returns 0 also for a saved, stopped run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logs = Path(os.environ[LOGS_VARIABLE])
    run_dir = Path(arguments[0]).parent
    try:
        # Before all that takes time: a signal from now on is passed on to the ranks.
        supervisor = Supervisor(logs, heartbeat_folder())
        try:
            return _run(Task.from_environment(os.environ), logs, supervisor, arguments)
        finally:
            shutil.rmtree(supervisor.heartbeats, ignore_errors=True)
    except Exception as error:
        code = exit_codes.exit_code_of(error)
        print(f"mixtron: {error}", file=sys.stderr, flush=True)
        if code == exit_codes.FAILED:
            traceback.print_exc()
        if code != exit_codes.RETRYABLE:
            exit_codes.write_exit_file(run_dir, code)
        return code


def heartbeat_folder() -> Path:
    """On the node's own disk, one for each launch and task."""
    launch, task = os.environ[exit_codes.LAUNCH_VARIABLE], os.environ.get("SLURM_PROCID", "0")
    folder = Path(os.environ["MIXTRON_SCRATCH"]) / "heartbeats" / f"{launch}.{task}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(task: Task, logs: Path, supervisor: Supervisor, arguments: list[str]) -> int:
    from mixtron.launch.config import load_config
    from mixtron.launch.slurm import preflight, triton_cache

    config = load_config(arguments[0])
    slurm = config.slurm
    if slurm is None:
        raise ConfigError(f"{arguments[0]}: no slurm section; submit the run with `mixtron submit`")
    port = preflight.meet(task, logs, config)
    if task.local_task == 0:
        triton_cache.unpack(Path(config.run_dir))
    rest = ["-m", "mixtron.launch.train", *arguments]
    if slurm.launcher == "torchrun":
        command = torchrun_command(task, slurm.ranks_of_node, port, rest)
        variables = {}
    else:
        command, variables = [sys.executable, *rest], rank_variables(task, port)
    variables |= network_variables(task)
    variables |= {
        HEARTBEATS_VARIABLE: str(supervisor.heartbeats),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(supervisor.heartbeats / NCCL_PIPE),
    }
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **variables}
    code = supervisor.run(task, command, environment, Path(config.run_dir))
    if task.task == 0 and code == 0:
        triton_cache.pack(Path(config.run_dir))
    return code


def torchrun_command(task: Task, ranks: int, port: int, rest: list[str]) -> list[str]:
    """torchrun of one node, which takes part in a c10d rendezvous on the first one.

    It ignores the signals that end a job: it would kill ranks that save after 30 s. The ranks get
    them from the supervisor.
    """
    is_host = str(task.node_number == 0).lower()
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(task.nodes)), "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{task.nodes[0]}:{port}"),
        *("--rdzv-id", task.launch, "--rdzv-conf", f"is_host={is_host}"),
        # Else the first node is announced by what its own resolver says, often 127.0.1.1.
        *("--local-addr", task.node),
        *("--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"),
        *rest,
    ]


def rank_variables(task: Task, port: int) -> dict[str, str]:
    """What torchrun would tell the one rank that is this task."""
    return {
        "RANK": str(task.task),
        "WORLD_SIZE": str(task.tasks),
        "LOCAL_RANK": str(task.local_task),
        "MASTER_ADDR": task.nodes[0],
        "MASTER_PORT": str(port),
    }


def network_variables(task: Task) -> dict[str, str]:
    """The interface that leads to the other nodes, for gloo, which else asks the node's own name.

    Many nodes resolve themselves to 127.0.1.1. A value that is already set is kept.
    """
    others = [node for node in task.nodes if node != task.node]
    if "GLOO_SOCKET_IFNAME" in os.environ or not others:
        return {}
    with contextlib.suppress(OSError):
        import psutil

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 9))  # sends nothing: it only asks for the route
            address = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(a.address == address for a in addresses):
                return {"GLOO_SOCKET_IFNAME": name}
    return {}


if __name__ == "__main__":
    sys.exit(main())
