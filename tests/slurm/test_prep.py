"""A corpus plan as a job array: an element that is killed, one with bad input, and resubmission."""

import sys
import time
from pathlib import Path

import pytest

from mixtron.data_prep.errors import DataError
from mixtron.launch.slurm import prep, queue
from mixtron.launch.slurm.config import SlurmConfig
from tests.helpers.jobs import write_config
from tests.slurm.scenario import WAIT_S, mixtron

PREP = """#!{python}
# Stands for `python -m mixtron.launch.cli prep (run|merge|verify) PREFIX`.
import os, pathlib, signal, sys
command, prefix = sys.argv[4], sys.argv[5]
folder = pathlib.Path(prefix).parent
if command == "run":
    number, count = sys.argv[sys.argv.index("--element") + 1].split("/")
    with open(folder / "calls", "a") as calls:
        calls.write(f"{{number}}\\n")
    if number == "1" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == "2" and not (folder / "mended").exists():
        sys.exit(2)
    (folder / f"part_{{number}}").write_text(number)
if command == "merge":
    pathlib.Path(prefix).write_text("".join(p.read_text() for p in sorted(folder.glob("part_*"))))
if command == "verify":
    sys.exit(pathlib.Path(prefix).read_text() != "0123")
"""


@pytest.fixture
def planned(tmp_path) -> Path:
    """The prefix of a plan of four units."""
    (tmp_path / "corpus.plan.json").write_text('{"units": [1, 2, 3, 4]}')
    return tmp_path / "corpus"


@pytest.fixture
def profile(tmp_path) -> Path:
    program = tmp_path / "python"
    program.write_text(PREP.format(python=sys.executable))
    program.chmod(0o755)
    keys = {"gpus_per_node": 0, "ranks_per_node": 1, "time_limit": "00:30:00"}
    return write_config(tmp_path / "cpu.yaml", keys | {"python": str(program)})


def wait_for_all() -> None:
    """Until no element waits or runs: a requeued one is in the queue all the while."""
    deadline_s = time.monotonic() + WAIT_S
    while [job for job in queue.queued_jobs() if job.comment.startswith("mixtron prep")]:
        assert time.monotonic() < deadline_s
        time.sleep(0.3)


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_only_what_failed_is_done_again(cluster, planned, profile, tmp_path):
    arguments = ("prep", "submit", str(planned), "--cluster", str(profile), "--workers", "1")
    assert "4 elements, then job" in mixtron(*arguments)
    with pytest.raises(queue.SlurmError, match="wait for it"):
        mixtron(*arguments)
    wait_for_all()
    assert sorted((tmp_path / "calls").read_text().split()) == ["0", "1", "1", "2", "3"]
    assert not planned.exists(), "merged although an element ended on bad input"
    (tmp_path / "mended").touch()
    assert "1 elements, then job" in mixtron(*arguments)
    wait_for_all()
    assert (tmp_path / "calls").read_text().split()[-1] == "2"
    assert len((tmp_path / "calls").read_text().split()) == 6
    assert planned.read_text() == "0123"


def test_what_is_left(planned, tmp_path):
    slurm = SlurmConfig()
    assert prep.plan(planned, slurm, elements=16, workers=1).left == [0, 1, 2, 3]
    few = prep.plan(planned, slurm, elements=3, workers=1)
    assert few.elements == 3
    folder = prep.slurm_folder(planned)
    folder.mkdir()
    (folder / "elements").write_text("3\n")
    (folder / "done_1").touch()
    assert prep.plan(planned, slurm, elements=16, workers=1).left == [0, 2]
    # A new plan has other units under the same numbers.
    (tmp_path / "corpus.plan.json").write_text('{"units": [1]}')
    assert prep.plan(planned, slurm, elements=16, workers=1).left == [0]


def test_no_plan(tmp_path):
    with pytest.raises(DataError, match="no such plan; make it with"):
        prep.plan(tmp_path / "nothing", SlurmConfig(), 1, 1)
    (tmp_path / "x.plan.json").write_text("[]")
    with pytest.raises(DataError, match="not a plan"):
        prep.plan(tmp_path / "x", SlurmConfig(), 1, 1)
