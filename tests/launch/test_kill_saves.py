"""Ranks killed in their saves, many times: as in test_kill.py, without the cost of a launcher.

Every step is saved, so that most moments of a run are some moment of a save.
"""

import os
import random
import signal
import threading
from pathlib import Path

import pytest

from mixtron.launch import loop
from mixtron.launch.checkpoint_files import list_checkpoints
from tests.helpers.jobs import history, last_step
from tests.helpers.ranks import RankFailure, renew_ranks, run_on_ranks
from tests.launch.deepspeed_runs import MEGATRON, zero
from tests.launch.short_runs import run_ranks, trained, write

STEPS_A_KILL = 5
"""More than a killed run can gain, so that the run outlasts all kills."""
JOB = [
    "checkpoint.save_every_steps=1",
    "parallel={tensor: 1}",
    "logging.tensorboard=false",
]


def killed(config: str, overrides: list[str], last: int, wait_s: float) -> None:
    """Trains; each rank is killed by SIGKILL some time after its step `last` began."""
    train_step, begun = loop.train_step, []

    def step(run):
        begun.append(run)
        if len(begun) == last:
            threading.Timer(wait_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return train_step(run)

    loop.train_step = step
    trained(config, overrides, None)


def test_six_random_kills(corpus, tmp_path):
    kill_and_compare(corpus, tmp_path, MEGATRON, 6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("engine", "kills"),
    [(MEGATRON, 40), (zero(1), 8), (zero(2), 8), (zero(3), 8)],
    ids=["megatron", "stage 1", "stage 2", "stage 3"],
)
def test_many_random_kills(corpus, tmp_path, engine, kills):
    kill_and_compare(corpus, tmp_path, engine, kills)


def kill_and_compare(corpus: Path, tmp_path: Path, engine: list[str], kills: int) -> None:
    renew_ranks()
    steps = STEPS_A_KILL * kills
    draw, overrides = random.Random(7), [*JOB, f"training.steps={steps}", *engine]
    run_dir, straight = tmp_path / "killed/run", write(corpus, tmp_path / "straight")
    config, newest = write(corpus, tmp_path / "killed"), 0
    for kill in range(kills):
        asynchronous = kill % 2 == 1
        mode = f"checkpoint.asynchronous={str(asynchronous).lower()}"
        when = draw.randint(1, 3), draw.uniform(0, 0.2)
        with pytest.raises(RankFailure, match=r"rank \d failed"):
            run_on_ranks(2, killed, str(config), [*overrides, mode], *when)
        found = list_checkpoints(run_dir / "checkpoints")
        assert all(checkpoint.complete for checkpoint in found)
        before, newest = newest, max((checkpoint.step for checkpoint in found), default=0)
        assert newest >= before
        assert last_step(run_dir) - newest <= 1 + asynchronous
        assert newest < steps, "the run ended before all kills: give it more steps"
    ended, expected = (run_ranks(2, path, overrides, None)[0] for path in (config, straight))
    assert ended.code == expected.code == 0, ended.error
    assert history(run_dir) == history(straight.parent / "run")
    assert ended.weights == expected.weights
