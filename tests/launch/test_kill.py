"""A run that is killed again and again ends where a straight run ends, bit for bit."""

import hashlib
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from mixtron.launch.checkpoint_files import list_checkpoints
from tests.helpers.jobs import (
    SEQUENCE,
    Job,
    history,
    last_step,
    rows,
    small_config,
    write_config,
)
from tests.helpers.ranks import run_on_ranks
from tests.launch.deepspeed_runs import zero

STEPS = 84
SAVE_EVERY = 6
JOB = [
    f"training.steps={STEPS}",
    f"training.global_batch_tokens={2 * SEQUENCE}",
    f"checkpoint.save_every_steps={SAVE_EVERY}",
]


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory) -> Path:
    return run_straight(corpus, tmp_path_factory.mktemp("straight"), [])


def run_straight(corpus: Path, folder: Path, overrides: list[str]) -> Path:
    """The run folder of a run that nothing happened to."""
    config = write_config(folder / "config.yaml", small_config(corpus, folder / "run"))
    job = Job(config, folder / "run", overrides=[*JOB, *overrides]).start()
    assert job.wait() == 0, job.log()[-3000:]
    return folder / "run"


def weights_hash(checkpoint: Path) -> str:
    """Of every parameter as one rank loads it."""
    return run_on_ranks(1, _weights_hash, str(checkpoint))[0]


def _weights_hash(checkpoint: str) -> str:
    from mixtron.launch.checkpoint import load_weights
    from mixtron.launch.config import load_config
    from mixtron.megatron_ext.config import ParallelConfig
    from mixtron.megatron_ext.model import build_model, global_parameters
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    config = load_config(Path(checkpoint).parents[1] / "config.yaml")
    ranks = init_model_parallel(seed=1, device=init_distributed())
    chunks = build_model(
        config.model, config.mixers, ParallelConfig(), ranks, seed=1, bf16=False, max_tokens=32
    )
    load_weights(Path(checkpoint), chunks, ranks)
    digest = hashlib.sha256()
    for name, parameter in global_parameters(chunks[0]):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def kill_and_compare(
    start_job,
    corpus: Path,
    straight: Path,
    folder: Path,
    kills: int,
    seed: int,
    overrides: list[str],
) -> None:
    """Kills the job `kills` times, each time at a random moment of one saving interval.

    The moment is counted in steps, so that the run outlasts all kills on a fast machine too.
    """
    draw = random.Random(seed)
    run_dir = folder / "run"
    config = write_config(folder / "config.yaml", small_config(corpus, run_dir))
    for kill in range(kills):
        complete = [c.step for c in list_checkpoints(run_dir / "checkpoints") if c.complete]
        assert STEPS not in complete, "the run ended before all kills: give it more steps"
        mode = f"checkpoint.asynchronous={'true' if kill % 2 else 'false'}"
        job = start_job(config, run_dir, [*JOB, *overrides, mode])
        job.wait_for_step(max([0, *complete]) + draw.randint(1, SAVE_EVERY))
        time.sleep(draw.uniform(0, 0.1))
        job.kill()
        kept = [c.step for c in list_checkpoints(run_dir / "checkpoints") if c.complete]
        assert not complete or max(kept) >= max(complete)
        assert last_step(run_dir) - max([0, *kept]) <= 2 * SAVE_EVERY
    job = start_job(config, run_dir, [*JOB, *overrides])
    assert job.wait() == 0, job.log()[-3000:]
    assert history(run_dir) == history(straight)
    final = f"checkpoints/step_{STEPS:08d}"
    assert weights_hash(run_dir / final) == weights_hash(straight / final)
    assert not list((run_dir / "checkpoints").glob(".*tmp*"))


def test_two_random_kills(start_job, corpus, straight, tmp_path):
    """With a launcher, once for each way to save; test_kill_saves.py has more."""
    kill_and_compare(start_job, corpus, straight, tmp_path, kills=2, seed=8, overrides=[])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_random_kills_under_zero(start_job, corpus, tmp_path, stage):
    """On two data ranks, between which ZeRO splits what it splits."""
    overrides = ["parallel={tensor: 1}", *zero(stage)]
    straight = run_straight(corpus, tmp_path, overrides)
    folder = tmp_path / "killed"
    folder.mkdir()
    kill_and_compare(start_job, corpus, straight, folder, 2, seed=stage, overrides=overrides)


def test_signal_saves_and_asks_for_another_start(start_job, corpus, straight, tmp_path):
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "config.yaml", small_config(corpus, run_dir))
    # A process inherits which signals are blocked: this one's parent may have blocked them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    job = start_job(config, run_dir, JOB)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    job.wait_for_step(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(400) == 75, job.log()[-3000:]
    saved = [c.step for c in list_checkpoints(run_dir / "checkpoints") if c.complete]
    assert saved
    assert max(saved) == last_step(run_dir) < STEPS
    job = start_job(config, run_dir, JOB)
    assert job.wait() == 0, job.log()[-3000:]
    assert f"resumed {run_dir}/checkpoints/step_{max(saved):08d}" in job.log()
    # Saving at another step than the straight run must not change what is computed.
    assert history(run_dir) == history(straight)


def ranks_of(job: Job) -> list[psutil.Process]:
    """The job's rank processes, by rank."""
    found = [
        p
        for p in psutil.Process(job.process.pid).children(recursive=True)
        if "mixtron.launch.train" in p.cmdline() and "RANK" in p.environ()
    ]
    return sorted(found, key=lambda p: p.environ()["RANK"])


def test_one_killed_rank_is_a_failure_worth_a_restart(start_job, corpus, tmp_path):
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "config.yaml", small_config(corpus, run_dir))
    job = start_job(config, run_dir, JOB)
    job.wait_for_step(2)
    ranks_of(job)[1].kill()
    assert job.wait(400) == 76, job.log()[-3000:]


def test_no_rank_outlives_its_job_and_two_jobs_never_share_a_folder(start_job, corpus, tmp_path):
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "config.yaml", small_config(corpus, run_dir))
    endless = ["training.steps=100000", "checkpoint.save_every_steps=100000"]
    job = start_job(config, run_dir, endless)
    job.wait_for_step(2)
    ranks = ranks_of(job)
    assert len(ranks) == 2
    # The running job rests meanwhile: on two cores it would keep the other from starting.
    for rank in ranks:
        rank.suspend()
    second = start_job(config, run_dir, endless)
    assert second.wait(400) == 2
    assert "another job is running there (host" in job.log()
    reached = last_step(run_dir)
    for rank in ranks:
        rank.resume()
    job.wait_for_step(reached + 1)
    torchrun = psutil.Process(job.process.pid).children()[0]
    torchrun.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert job.wait(400) == 76


def test_progress_is_written_down(straight):
    steps = [row["step"] for row in rows(straight) if "train/loss" in row]
    assert steps == list(range(1, STEPS + 1))
    losses = [row["train/loss"] for row in rows(straight) if "train/loss" in row]
    assert sum(losses[-10:]) < sum(losses[:10]) - 3
    assert (straight / "config.yaml").exists()
    assert list((straight / "tensorboard").glob("events.*"))
