"""A corpus plan as a job array: an element that is killed, one with bad input, and resubmission."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mixtron.data_prep.build import build
from mixtron.data_prep.errors import DataError
from mixtron.data_prep.shards import shard_paths
from mixtron.launch.slurm import prep, queue
from mixtron.launch.slurm.config import SlurmConfig
from tests.data_prep.corpora import write_jsonl
from tests.helpers.jobs import write_config
from tests.slurm.scenario import WAIT_S, mixtron

SOURCES = "abcd"
"""Each a file, a unit and a shard."""
PYTHON = """#!/bin/bash
# The interpreter; element 3 is killed when it starts for the first time.
[[ "$*" != *"--element 3/"* || ${{SLURM_RESTART_COUNT:-0}} != 0 ]] || kill -9 $$
exec {python} "$@"
"""


@pytest.fixture
def prefix(tmp_path) -> Path:
    """The output of a plan of four units, of whose inputs none is there yet."""
    return tmp_path / "corpus"


def write_source(prefix: Path, source: str, rest: bytes = b"") -> None:
    path = prefix.parent / f"{source}.jsonl"
    write_jsonl(path, [f"{source} says: my fellow citizens, {i}" for i in range(20)])
    with open(path, "ab") as file:
        file.write(rest)


def make_plan(corpus: Path, prefix: Path) -> None:
    inputs = [f"--input={source}={prefix.parent}/{source}.jsonl" for source in SOURCES]
    output = [f"--tokenizer={corpus}/tok.model", f"--output={prefix}"]
    assert "4 units" in mixtron("prep", "plan", *inputs, *output)


def wait_for_all() -> None:
    """Until no element waits or runs: a requeued one is in the queue all the while."""
    deadline_s = time.monotonic() + WAIT_S
    while [job for job in queue.queued_jobs() if job.comment.startswith("mixtron-prep")]:
        assert time.monotonic() < deadline_s
        time.sleep(0.3)


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_only_what_failed_is_done_again(cluster, corpus, prefix, tmp_path):
    for source in SOURCES:
        write_source(prefix, source, rest=b"not json\n" if source == "c" else b"")
    make_plan(corpus, prefix)
    program = tmp_path / "python"
    program.write_text(PYTHON.format(python=sys.executable))
    program.chmod(0o755)
    keys = {"gpus_per_node": 0, "ranks_per_node": 1, "time_limit": "00:30:00"}
    profile = write_config(tmp_path / "cpu.yaml", keys | {"python": str(program)})
    arguments = ("prep", "submit", str(prefix), "--cluster", str(profile), "--workers", "1")

    said = mixtron(*arguments)
    assert "4 elements, then job" in said
    assert "(0 of 4 units are done)" in said
    with pytest.raises(queue.SlurmError, match="wait for it"):
        mixtron(*arguments)
    assert str(prefix) not in mixtron("status")
    wait_for_all()
    outputs = [_output(prefix, said, element) for element in range(4)]
    for element, codes in enumerate((["0"], ["0"], ["2"], ["137", "0"])):
        ends = [line for line in outputs[element].splitlines() if "ended with exit code" in line]
        assert [line.split()[-1] for line in ends] == codes, outputs[element]
    assert "c.jsonl:21" in outputs[2]
    assert not shard_paths(f"{prefix}-a")[0].exists(), "merged although an element failed"

    write_source(prefix, "c")
    make_plan(corpus, prefix)
    said = mixtron(*arguments)
    assert "1 elements, then job" in said
    assert "(3 of 4 units are done)" in said
    wait_for_all()
    assert "ended with exit code 0" in _output(prefix, said, 2)
    for source in SOURCES:
        alone = tmp_path / f"alone-{source}"
        build([f"{tmp_path}/{source}.jsonl"], corpus / "tok.model", alone, progress=False)
        for made, expected in zip(
            shard_paths(f"{prefix}-{source}")[:2], shard_paths(alone)[:2], strict=True
        ):
            assert made.read_bytes() == expected.read_bytes()
    finish = said.split("then job ")[1].split(":")[0]
    proof = Path(f"{prefix}.slurm", f"finish_{finish}.out").read_text()
    assert f"{prefix}-d: 20 documents" in proof
    assert "sound" in proof
    assert not Path(f"{prefix}.parts").exists()
    subprocess.run(["shellcheck", f"{prefix}.slurm/prep.sh"], check=True)


def _output(prefix: Path, said: str, element: int) -> str:
    array = said.removeprefix("array ").split(":")[0]
    return Path(f"{prefix}.slurm", f"{array}_{element}.out").read_text()


def test_what_is_left(corpus, prefix):
    for source in SOURCES:
        write_source(prefix, source)
    make_plan(corpus, prefix)
    assert left(prefix, 16) == [0, 1, 2, 3]
    assert left(prefix, 3) == [0, 1, 2]
    mixtron("prep", "run", str(prefix), "--element", "1/4", "--quiet")
    assert left(prefix, 16) == [0, 2, 3]
    assert left(prefix, 3) == [0, 2], "units 0 and 3, and 2"
    # Another file in a new plan: what was done of the others stays done.
    write_source(prefix, "c", rest=b'{"text": "and more"}\n')
    make_plan(corpus, prefix)
    assert left(prefix, 16) == [0, 2, 3]
    mixtron("prep", "run", str(prefix), "--quiet")
    assert left(prefix, 16) == []
    mixtron("prep", "merge", str(prefix), "--quiet")
    assert left(prefix, 16) == []
    assert "units are done and merged" in mixtron("prep", "status", str(prefix))


def left(prefix: Path, elements: int) -> list[int]:
    return prep.plan(prefix, SlurmConfig(), elements, workers=1).left


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (0, "RUNNING", 0, False),
        (2, "RUNNING", 0, False),
        (75, "RUNNING", 0, True),
        (137, "RUNNING", 2, True),
        (137, "RUNNING", 3, False),
        (75, "CANCELLED", 0, False),
    ],
)
def test_what_an_element_does_after_its_end(
    corpus, prefix, tmp_path, monkeypatch, code, state, restarts, requeued
):
    commands = {
        "python": f"exit {code}",
        "scontrol": f'echo "$*" >>{tmp_path}/calls; echo "JobId=9 JobState={state} Reason=None"',
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "calls").touch()
    for source in SOURCES:
        write_source(prefix, source)
    make_plan(corpus, prefix)
    slurm = SlurmConfig(gpus_per_node=0, ranks_per_node=1, python=str(tmp_path / "python"))
    script = tmp_path / "prep.sh"
    script.write_text(prep.plan(prefix, slurm, elements=4, workers=1).script)
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "9",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURMD_NODENAME": "n1",
    }.items():
        monkeypatch.setenv(name, value)
    assert subprocess.run(["bash", str(script)]).returncode == code
    assert ("requeue 9_3" in (tmp_path / "calls").read_text().splitlines()) == requeued


def test_no_plan(tmp_path):
    with pytest.raises(DataError, match="no such plan; make it with"):
        prep.plan(tmp_path / "nothing", SlurmConfig(), 1, 1)
    (tmp_path / "x.plan.json").write_text("{")
    with pytest.raises(DataError, match="not a plan"):
        prep.plan(tmp_path / "x", SlurmConfig(), 1, 1)


def test_the_script_is_bash_and_verifies_every_shard(corpus, prefix):
    for source in SOURCES:
        write_source(prefix, source)
    make_plan(corpus, prefix)
    text = mixtron("prep", "submit", str(prefix), "--dry-run")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert f"prep verify {prefix}-a {prefix}-b {prefix}-c {prefix}-d --quiet" in text
    assert not Path(f"{prefix}.slurm").exists()
