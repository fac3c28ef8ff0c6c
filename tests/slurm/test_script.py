"""The batch script, run by bash with stand-ins for SLURM's commands; and shellcheck."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mixtron.launch.slurm.config import SlurmConfig
from mixtron.launch.slurm.script import job_script

CPU = {"gpus_per_node": 0, "ranks_per_node": 1, "nodes": 2}
SRUN = """#!/bin/bash
# Stands for two tasks on two nodes: runs $TASK in each, with its own variables, and passes signals.
trap 'kill -USR1 $(jobs -p)' USR1
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_NTASKS=2 "$TASK" "$@" &
done
code=0
for task in $(jobs -p); do
    until wait "$task"; do
        ended=$?
        kill -0 "$task" 2>/dev/null || { code=$ended; break; }
    done
done
exit $code
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$CALLS"
[[ $1 != -o ]] || echo "JobId=7 JobState=${JOB_STATE:-RUNNING} Reason=None"
"""


def write_script(folder: Path, **options) -> Path:
    values = {key: options.pop(key) for key in ("chained", "array_size") if key in options}
    slurm = SlurmConfig.model_validate(CPU | options)
    text = job_script("a-run", slurm, folder / "run", working_dir=folder, **values)
    script = folder / "job.sh"
    script.write_text(text)
    return script


@pytest.fixture
def fake(tmp_path):
    """Runs the script with stand-ins; returns (exit code, output, calls of scontrol)."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.touch()

    def start(task: str, variables: dict | None = None, **options) -> subprocess.Popen:
        program = tmp_path / "task"
        program.write_text(f"#!{sys.executable}\n{task}")
        program.chmod(0o755)
        run_dir = tmp_path / "run"
        (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "TASK": str(program),
            "CALLS": str(calls),
            "RUN": str(run_dir),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            **(variables or {}),
        }
        return subprocess.Popen(
            ["bash", str(write_script(tmp_path, **options))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(task: str, variables: dict | None = None, **options) -> tuple[int, str, str]:
        process = start(task, variables, **options)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output, calls.read_text()

    run.start = start
    return run


def ending(code: int) -> str:
    """A task after which the run folder says that the run ended with `code`."""
    return f"""
import json, os, sys
content = {{"exit_code": {code}, "launch": os.environ["MIXTRON_LAUNCH"]}}
open(os.environ["RUN"] + "/exit.json", "w").write(json.dumps(content))
sys.exit(0 if {code} == 75 else {code})
"""


SILENT = "import sys; sys.exit(76)"


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (75, True)])
def test_exit_codes(fake, code, requeued):
    ended, output, calls = fake(ending(code))
    assert ended == code, output
    assert ("scontrol requeue 7" in calls) == requeued


def test_ranks_that_left_no_word_are_requeued(fake):
    ended, output, calls = fake(SILENT)
    assert ended == 76, output
    assert calls.endswith("scontrol requeue 7\n")


def test_an_older_launch_has_no_say(fake, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit.json").write_text('{"exit_code": 0, "launch": "7.0"}\n')
    ended, _, _ = fake(SILENT, {"SLURM_RESTART_COUNT": "1"})
    assert ended == 76


def test_three_starts_without_progress_are_enough(fake, tmp_path):
    for restart in range(3):
        ended, output, calls = fake(SILENT, {"SLURM_RESTART_COUNT": str(restart)})
        assert ended == 76
        assert calls.count("requeue 7") == min(restart + 1, 2)
    assert "given up: 3 launches in a row" in output


def test_progress_begins_the_count_anew(fake, tmp_path):
    latest = tmp_path / "run" / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)
    for restart in range(6):
        if restart % 2 == 0:
            latest.write_text(f"step_{restart:08d}\n")
        _, output, calls = fake(SILENT, {"SLURM_RESTART_COUNT": str(restart)})
        assert calls.count("requeue 7") == restart + 1, output


def test_another_submission_begins_the_count_anew(fake):
    for restart in range(2):
        fake(SILENT, {"SLURM_RESTART_COUNT": str(restart)})
    _, output, calls = fake(SILENT, {"SLURM_JOB_ID": "8"})
    assert calls.endswith("scontrol requeue 8\n"), output


def test_a_cancelled_run_is_not_requeued(fake, tmp_path):
    task = "import os\nopen(os.environ['RUN'] + '/slurm/cancelled', 'w')\n" + ending(75)
    ended, output, calls = fake(task)
    assert ended == 75
    assert "requeue" not in calls
    assert "cancelled: not requeued" in output


def test_a_job_that_slurm_took_away_is_not_requeued(fake):
    ended, _, calls = fake(SILENT, {"JOB_STATE": "CANCELLED"})
    assert ended == 76
    assert "requeue" not in calls


def test_an_element_of_an_array_requeues_itself_alone(fake, tmp_path):
    """Its SLURM_JOB_ID, if it started last, is also the id of the whole array."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "runs.txt").write_text(f"{tmp_path}/run\n" * 3)
    element = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    ended, output, calls = fake(SILENT, element, array_size=3)
    assert ended == 76, output
    assert calls.splitlines() == ["scontrol -o show job 7_2", "scontrol requeue 7_2"]


def test_bad_nodes_are_left_out(fake):
    task = """
import os, sys
log = open(os.environ["MIXTRON_LOGS"] + "/task_" + os.environ["SLURM_PROCID"] + ".log", "w")
log.write("mixtron: bad node n2: its GPU 3 is gone\\nmixtron: bad node n4: the same\\n")
sys.exit(76)
"""
    _, output, calls = fake(task)
    assert "requeued without n2,n4" in output
    requeue = ["requeuehold 7", "update jobid=7 excnodelist=n2,n4", "release 7"]
    assert [line for line in calls.splitlines() if "-o" not in line] == [
        f"scontrol {command}" for command in requeue
    ]


def test_each_task_reads_its_own_variables(fake, tmp_path):
    task = """
import os
from mixtron.launch.slurm.run_task import rank_variables
from mixtron.launch.slurm.task import Task
task = Task.from_environment(os.environ)
open(os.environ["RUN"] + f"/rank_{task.node_number}", "w").write(str(rank_variables(task, 1)))
"""
    fake(task + ending(0))
    for rank in (0, 1):
        text = (tmp_path / "run" / f"rank_{rank}").read_text()
        assert f"'RANK': '{rank}'" in text
        assert "'WORLD_SIZE': '2'" in text
        assert "'MASTER_ADDR': 'n1'" in text


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_shell_reaches_the_tasks(fake, tmp_path, number):
    task = """
import os, pathlib, signal
run = pathlib.Path(os.environ["RUN"])
signal.signal(signal.SIGUSR1, lambda *_: None)
(run / f"ready_{os.environ['SLURM_PROCID']}").touch()
signal.pause()
(run / f"saved_{os.environ['SLURM_PROCID']}").touch()
"""
    process = fake.start(task + ending(75))
    run_dir = tmp_path / "run"
    deadline_s = time.monotonic() + 60
    while len(list(run_dir.glob("ready_*"))) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert len(list(run_dir.glob("saved_*"))) == 2
    assert "scontrol requeue 7" in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(("before", "ended", "ran"), [(0, 0, 0), (1, 1, 0), (2, 2, 0), (75, 0, 1)])
def test_a_link_of_a_chain_looks_at_the_one_before(fake, tmp_path, before, ended, ran):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "exit.json").write_text(f'{{"exit_code": {before}, "launch": "6.0"}}\n')
    code, output, calls = fake(ending(0), {"MIXTRON_CHAIN_LINK": "2"}, chained=True)
    assert code == ended, output
    assert output.count(" ended with exit code 0 (srun") == ran
    assert "requeue" not in calls


OPTIONS = [
    {},
    {"chained": True},
    {"array_size": 3},
    {
        "launcher": "srun",
        "gpus_per_node": 8,
        "ranks_per_node": None,
        "gpu_type": "a100",
        "cpus_per_task": 12,
        "modules": ["cuda/12.8"],
        "environment": {"NAME": "it's here"},
        "container": {"type": "pyxis", "image": "a b.sqsh", "mounts": ["/x:/y"]},
    },
    {"container": {"type": "apptainer", "image": "image.sif"}, "account": "me", "partition": "p"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_script_is_bash(tmp_path, options):
    subprocess.run(["bash", "-n", str(write_script(tmp_path, **options))], check=True)


@pytest.mark.cluster
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_shellcheck(tmp_path, options):
    script = write_script(tmp_path, **options)
    answer = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


def test_options_of_the_script(tmp_path):
    text = write_script(tmp_path, **OPTIONS[3]).read_text()
    for line in (
        "#!/bin/bash -l",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gres=gpu:a100:8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@300",
        "module load cuda/12.8",
        "export NAME='it'\"'\"'s here'",
    ):
        assert line in text.splitlines()
    for part in (
        "SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        "--kill-on-bad-exit=1",
        "--ntasks=16",
        "--container-image='a b.sqsh'",
        f"--container-mounts=/x:/y,{tmp_path}:{tmp_path},{tmp_path}/run:{tmp_path}/run",
        "python3 -m mixtron.launch.slurm.run_task",
    ):
        assert part in text
    apptainer = write_script(tmp_path, **OPTIONS[4]).read_text()
    assert "apptainer exec --nv --bind" in apptainer
    assert "#SBATCH --account=me" in apptainer


def test_values_are_one_word_each(tmp_path):
    """A value with spaces, quotes and a dollar comes out as it went in."""
    value = "a 'b' \"c\" $HOME `date` \\"
    text = write_script(tmp_path, environment={"VALUE": value}).read_text()
    line = next(line for line in text.splitlines() if line.startswith("export VALUE="))
    shown = subprocess.run(
        ["bash", "-c", f'{line}; printf %s "$VALUE"'], capture_output=True, text=True
    )
    assert shown.stdout == value
