"""A real SLURM on this machine: munged, slurmctld and three slurmd, which are three nodes."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("n1", "n2", "n3")
TASKS_A_NODE = 2
HOSTS = Path("/etc/hosts")
HOSTS_LINE = f"127.0.0.1 {' '.join(NODES)} # nodes of a test's SLURM, process {os.getpid()}\n"
"""Each process its own, which it takes away again: two may test at once."""


def missing() -> str:
    """Why no SLURM can be started here; empty if one can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed (`make slurm`, as root, on Debian)"
    return "" if os.geteuid() == 0 else "needs root"


class Cluster:
    """Runs until `stop`. While it runs, this process's SLURM_CONF points at it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        os.environ["PATH"] += ":/usr/sbin:/sbin"
        with open(HOSTS, "a") as hosts:
            hosts.write(HOSTS_LINE)
        self._start_munge()
        self._write_config()
        os.environ["SLURM_CONF"] = str(self.config)
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        deadline_s = time.monotonic() + 240
        while self.ask("sinfo", "-h", "-o", "%D %t").split() != [str(len(NODES)), "idle"]:
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.2)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.ask("scancel", "--me")
            deadline_s = time.monotonic() + 60
            while self.ask("squeue", "-h").strip() and time.monotonic() < deadline_s:
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
        shutil.rmtree(self.socket.parent, ignore_errors=True)
        HOSTS.write_text(HOSTS.read_text().replace(HOSTS_LINE, ""))
        del os.environ["SLURM_CONF"]

    def ask(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def logs(self) -> str:
        return "\n".join(f"{p}\n{p.read_text()[-3000:]}" for p in self.folder.glob("*.log"))

    def _daemon(self, *command: str, **options) -> None:
        with open(self.folder / f"{command[0]}.out", "a") as out:
            self._daemons.append(
                subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, **options)
            )

    def _start_munge(self) -> None:
        """With a key and a socket of its own, as its own user, who wants nobody else to write."""
        folder = Path(f"/run/munge-{os.getpid()}")
        folder.mkdir(mode=0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (folder, key):
            shutil.chown(path, "munge", "munge")
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        self.socket = folder / "socket"
        self._daemon(
            *("munged", "--foreground", f"--socket={self.socket}", *files),
            user="munge",
            group="munge",
            extra_groups=[],
        )
        deadline_s = time.monotonic() + 60
        while not self.socket.exists():
            assert time.monotonic() < deadline_s, (self.folder / "munged.out").read_text()
            time.sleep(0.05)

    def _write_config(self) -> None:
        control, *ports = free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname=localhost Port={port} CPUs={TASKS_A_NODE}"
            for node, port in zip(NODES, ports, strict=True)
        )
        (self.folder / "state").mkdir()
        self.config.write_text(f"""
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
# Else a requeued job waits two minutes for its old credential to expire.
AuthInfo=socket={self.socket},cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
KillWait=5
MinJobAge=3600
MpiDefault=none
JobRequeue=1
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=02:00:00 State=UP
""")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
