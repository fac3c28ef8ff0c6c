"""What a task reads from its environment, how it starts its ranks, and how it watches them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mixtron.launch import exit_codes
from mixtron.launch.config import load_config
from mixtron.launch.heartbeat import Beat, read_beats
from mixtron.launch.preflight import problems_of
from mixtron.launch.slurm import hangs, preflight, triton_cache
from mixtron.launch.slurm.bad_nodes import NodeError, report_hardware_fault
from mixtron.launch.slurm.hangs import HangWatch, RankState, is_waiting, verdict
from mixtron.launch.slurm.run_task import rank_variables, torchrun_command
from mixtron.launch.slurm.task import Task
from mixtron.launch.stragglers import slow_ranks
from mixtron.megatron_ext.errors import ConfigError
from tests.helpers.jobs import small_config, write_config

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_NTASKS": "99",  # the batch shell's idea
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",  # may be the login node's
    "MIXTRON_LAUNCH": "41.3",
}


@pytest.fixture
def task() -> Task:
    return Task.from_environment(STEP)


@pytest.fixture
def config(corpus, tmp_path):
    content = small_config(corpus, tmp_path / "run")
    content["slurm"] = {"nodes": 2, "gpus_per_node": 0, "ranks_per_node": 1}
    (tmp_path / "run").mkdir()
    return load_config(write_config(tmp_path / "config.yaml", content))


def test_a_rank_is_told_what_torchrun_would_tell_it(task):
    assert rank_variables(task, 20041) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu01",
        "MASTER_PORT": "20041",
    }


def test_torchrun_meets_on_the_first_node_by_name(task, tmp_path, monkeypatch):
    """Whatever `hostname --ip-address` says here, which is 127.0.1.1 on many nodes."""
    command = tmp_path / "hostname"
    command.write_text("#!/bin/sh\necho 127.0.1.1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = torchrun_command(task, 8, 20041, ["-m", "x"])
    text = " ".join(words)
    assert "--rdzv-endpoint gpu01:20041" in text
    assert "--local-addr gpu03" in text
    assert "--nnodes 4 --nproc-per-node 8" in text
    assert "is_host=false" in text
    assert "127." not in text
    first = Task.from_environment(STEP | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"})
    assert "is_host=true" in torchrun_command(first, 8, 1, [])[12:15]


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NODEID"])
def test_outside_a_job_step_it_says_so(name):
    environment = {key: value for key, value in STEP.items() if key != name}
    with pytest.raises(ConfigError, match=f"{name} is not set.*mixtron submit"):
        Task.from_environment(environment)


@pytest.mark.parametrize("job", [1, 16384, 49151, 99999999])
def test_ports_stay_in_their_range_and_differ_between_jobs(job):
    ports = [preflight.first_port(job + i, [20000, 29999]) for i in range(2)]
    assert all(20000 <= port <= 29999 for port in ports)
    assert ports[0] != ports[1]


def test_a_port_in_use_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NodeError, match="no free port"):
            preflight.free_port(port, [port, port])
        assert preflight.free_port(port, [port, port + 20]) > port


def test_ephemeral_ports_are_compared(tmp_path):
    source = tmp_path / "ip_local_port_range"
    source.write_text("9000\t65000\n")
    assert "overlaps the ephemeral ports 9000-65000" in preflight.ephemeral_overlap(
        [20000, 29999], source
    )
    assert preflight.ephemeral_overlap([5000, 8999], source) == ""
    assert preflight.ephemeral_overlap([5000, 8999], tmp_path / "none") == ""


@pytest.mark.parametrize("given", ["4", "a100:4", "gpu:a100:4(S:0-1)"])
def test_fewer_gpus_than_the_config_counts_on(given):
    with pytest.raises(ConfigError, match=r"slurm.gpus_per_node=8"):
        preflight.check_allotment({"SLURM_GPUS_PER_NODE": given}, 8)
    preflight.check_allotment({"SLURM_GPUS_PER_NODE": given}, 4)
    preflight.check_allotment({}, 8)


def test_ranks_that_are_bound_to_one_cpu_are_warned_of(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
    assert preflight.few_cpus(8).startswith("8 ranks share 1 CPUs")
    assert preflight.few_cpus(1) == ""


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("echo '0, 0'; echo '1, 0'", ""),
        ("echo '0, [N/A]'; echo '1, [N/A]'", ""),
        ("echo '0, 0'", "1 GPUs visible"),
        ("echo '0, 0'; echo '1, 7'", "GPU 1 has 7 uncorrected memory errors"),
        ("echo 'Unable to determine the device handle'; exit 9", "Unable to determine"),
    ],
)
def test_gpus_are_counted_and_asked_for_errors(tmp_path, monkeypatch, answer, problem):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{answer}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = preflight.check_gpus(2)
    assert found.startswith(problem) if not problem else problem in found


def test_no_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi is not there" in preflight.check_gpus(1)


def test_a_run_folder_that_is_not_shared(task, config, tmp_path, monkeypatch, capsys):
    """The batch script's token lies in another folder, as on a node without the file system."""
    monkeypatch.setattr(preflight, "SHARED_S", 0.2)
    with pytest.raises(NodeError, match="node gpu03: run_dir is not shared"):
        preflight.meet(task, tmp_path, config)
    assert "mixtron: bad node gpu03: run_dir is not shared" in capsys.readouterr().out


def test_a_task_that_never_starts_is_named(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "ARRIVAL_S", 0.5)
    monkeypatch.setenv("MIXTRON_SCRATCH", str(tmp_path))
    two = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NODELIST": "a,b"}
    first = Task.from_environment(
        two | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    )
    (tmp_path / "token").write_text("41.3\n")
    with pytest.raises(NodeError, match="node b: its task never started"):
        preflight.meet(first, tmp_path, config)
    assert "mixtron: bad node b:" in capsys.readouterr().out


def test_clocks_and_problems_of_ranks_name_their_nodes():
    assert problems_of([("a", 100.0, ""), ("b", 100.2, "")]) == []
    answers = [("a", 100.0, ""), ("b", 130.0, ""), ("c", 100.1, "GPU 0 is gone"), ("d", 100.0, "")]
    assert problems_of(answers) == [
        ("b", "its clock is 30 s ahead of the other nodes'"),
        ("c", "GPU 0 is gone"),
    ]


def test_only_broken_hardware_makes_a_node_bad(capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    report_hardware_fault(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert capsys.readouterr().out == ""
    report_hardware_fault(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    assert capsys.readouterr().out.startswith("mixtron: bad node n7: CUDA error: uncorrectable")


def test_slow_ranks_are_named():
    nodes, times_s = ["a", "a", "b", "b"], [0.1, 0.1, 0.3, 0.1]
    assert slow_ranks(nodes, times_s, "a step") == [
        "slow: rank 2 on b took 3.0 times the ranks' median for a step (0.3 s)"
    ]
    assert slow_ranks(["a"], [0.1], "a step") == []


def state(rank: int, count: int, waiting: bool) -> RankState:
    return RankState(rank, f"n{rank}", "step", 4, count, 30.0, waiting)


def test_the_verdict_names_who_is_behind():
    assert "rank 1 on n1" in verdict([state(0, 9, True), state(1, 9, False), state(2, 9, True)], [])
    assert "rank 2 on n2" in verdict([state(0, 9, True), state(1, 9, True), state(2, 8, True)], [])
    assert "all 2 ranks wait" in verdict([state(0, 9, True), state(1, 9, True)], [])
    assert "no word from task 1" in verdict([state(0, 9, True)], [1])


STACK = """Thread 0x1 (most recent call first):
  File "threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "{file}", line 10 in {function}
  File "loop.py", line 20 in train
"""


@pytest.mark.parametrize(
    ("file", "function", "waits"),
    [
        ("/x/torch/distributed/distributed_c10d.py", "all_reduce", True),
        ("/x/launch/signals.py", "agreed", True),
        ("/x/mixer.py", "forward", False),
    ],
)
def test_who_waits_is_read_off_the_main_threads_stack(file, function, waits):
    assert is_waiting(STACK.format(file=file, function=function)) == waits


RANK = """
import os, signal, sys, time
from mixtron.launch import heartbeat
from mixtron.launch.signals import StopFlag
stop = StopFlag()
heartbeat.begin(0)
heartbeat.set_limits({"step": 1.0, "save": 60.0})
heartbeat.beat(sys.argv[1], 3)
if heartbeat.stop_requested():
    sys.exit(75)
while not stop.requested():
    time.sleep(0.05)
sys.exit(75)
"""


@pytest.fixture
def supervised(tmp_path):
    """Starts a rank under a supervisor in a process of its own, as srun would."""
    logs, heartbeats, run_dir = (tmp_path / name for name in ("logs", "beats", "run"))
    for folder in (logs, heartbeats, run_dir):
        folder.mkdir()

    def start(*rank: str) -> subprocess.Popen:
        program = f"""
import os, sys
from pathlib import Path
from mixtron.launch.slurm.supervisor import Supervisor
from mixtron.launch.slurm.task import Task
environment = {STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}!r}
supervisor = Supervisor(Path({str(logs)!r}), Path({str(heartbeats)!r}))
task = Task.from_environment(environment)
variables = {{"MIXTRON_HEARTBEATS": {str(heartbeats)!r}, "MIXTRON_LOGS": {str(logs)!r}}}
sys.exit(supervisor.run(task, {list(rank)!r}, os.environ | variables, Path({str(run_dir)!r})))
"""
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    start.logs, start.heartbeats = logs, heartbeats
    return start


def wait_for_beat(heartbeats: Path) -> Beat:
    deadline_s = time.monotonic() + 60
    while not (beats := read_beats(heartbeats)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return beats[0]


def test_a_signal_is_passed_to_the_rank_and_a_stop_is_no_failure_of_the_task(supervised):
    process = supervised(sys.executable, "-c", RANK, "save")
    wait_for_beat(supervised.heartbeats)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_rank_that_was_not_there_yet_learns_of_the_stop(supervised):
    late = f"import time; time.sleep(1.5)\n{RANK}"
    process = supervised(sys.executable, "-c", late, "save")
    deadline_s = time.monotonic() + 30
    while not children(process.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


@pytest.mark.parametrize(
    ("code", "expected"), [("exit(1)", 76), ("os.kill(os.getpid(), 9)", 76), ("exit(0)", 0)]
)
def test_how_a_task_ends(supervised, code, expected):
    process = supervised(sys.executable, "-c", f"import os; {code}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == expected
    assert ("was killed by SIGKILL" in output) == ("kill" in code)


def test_a_silent_rank_is_found_and_its_stack_written(supervised):
    process = supervised(sys.executable, "-c", RANK, "step")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == exit_codes.RETRYABLE
    assert "hang: rank 0 on gpu03 (step, step 3, silent for" in output
    assert "in <module>" in (supervised.logs / "stacks_rank_00000.txt").read_text()
    assert (supervised.logs / "hang" / "verdict").read_text() in output


def test_a_long_save_is_no_hang(supervised):
    process = supervised(sys.executable, "-c", RANK, "save")
    wait_for_beat(supervised.heartbeats)
    time.sleep(4)  # four times the limit of a step
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    assert not (supervised.logs / "hang").exists()


def test_another_tasks_hang_is_noticed(task, tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "ANSWER_S", 0.1)
    watch = HangWatch(task, tmp_path, tmp_path)
    assert not watch.hang_found()
    (tmp_path / "hang").mkdir()
    watch._next_shared_s = 0.0
    assert watch.hang_found()
    assert json.loads((tmp_path / "hang" / "task_00005.json").read_text()) == []


def test_the_triton_cache_is_kept_in_the_run_folder(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    (run_dir / "slurm").mkdir(parents=True)
    for node in ("one", "two"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / node))
        triton_cache.unpack(run_dir)
        kernel = tmp_path / node / "abc" / "kernel.cubin"
        if node == "one":
            triton_cache.pack(run_dir)
            assert not (run_dir / triton_cache.ARCHIVE).exists(), "nothing was compiled"
            kernel.parent.mkdir()
            kernel.write_text("binary")
            triton_cache.pack(run_dir)
        assert kernel.read_text() == "binary"
