"""Runs that SLURM starts, stops, kills and requeues, through `mixtron submit`."""

from pathlib import Path

import pytest

from mixtron.launch.slurm.hostlist import expand
from tests.helpers.jobs import history, last_step
from tests.slurm.scenario import Job, mixtron, scenario

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
LAST = "step_00000012"
"""The small run's last checkpoint."""
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def newest(job: Job) -> str:
    return (job.run_dir / "checkpoints" / "latest").read_text().strip()


def assert_equals_straight(job: Job, jobs: dict[str, Job]) -> None:
    """Bit for bit, every step."""
    straight = jobs["test_two_nodes_with_a_task_a_rank"]
    assert straight.wait() == ("COMPLETED", 0), straight.all_logs()
    assert history(job.run_dir) == history(straight.run_dir)
    assert newest(job) == LAST


@scenario(ranks=1, place=-1, faults=[{"kind": "wait for signal", "step": 4}])
def test_status_logs_and_cancel_tell_the_truth(job):
    job.wait_for_step(3)
    shown = mixtron("status", str(job.run_dir))
    assert f"job        {job.ids[0]}\nstate      running" in shown
    assert " of 12, loss" in shown
    assert "done in" in shown
    assert "checkpoint none" in shown
    assert str(job.run_dir) in mixtron("status")
    assert "| loss" in mixtron("logs", str(job.run_dir), "--rank", "0")
    assert "launch" in mixtron("logs", str(job.run_dir))
    config = str(job.run_dir / "config.yaml")
    with pytest.raises(Exception, match=f"job {job.ids[0]} of this run is RUNNING"):
        mixtron("submit", config)
    with pytest.raises(Exception, match="no log of rank 7; it has ranks 0 to 0"):
        mixtron("logs", str(job.run_dir), "--rank", "7")
    said = mixtron("cancel", str(job.run_dir))
    assert "cancelled; newest checkpoint: step_00000004" in said
    assert job.wait() == ("FAILED", 75), job.all_logs()
    assert "cancelled: not requeued" in job.output()
    assert "stopped and saved (exit code 75)" in mixtron("status", str(job.run_dir))
    assert "no job of this run waits or runs" in mixtron("cancel", str(job.run_dir))


@scenario(
    place=0,
    faults=[{"kind": "wait for signal", "step": 6, "start": 1}],
    overrides=["slurm.signal_lead_s=600"],
)
def test_time_limit_saves_requeues_and_resumes_bit_equal(job, jobs):
    job.wait_for_step(5)
    # The job's own limit, moved to just after this moment: SLURM sends its signal at its next look.
    job.limit_minutes(job.elapsed_minutes() + 8)
    job.wait_for_output("ended with exit code 75")
    job.limit_minutes(30)
    assert job.wait() == ("COMPLETED", 0), job.all_logs()
    assert [words[1] for words in job.launches] == ["nothing", "step_00000006"]
    assert "requeued" in job.output()
    assert_equals_straight(job, jobs)


@scenario(
    launcher="torchrun",
    config=QUICKSTART,
    overrides=[
        "model.vocab_size=600",
        "data.tokenizer={corpus}/tok.model",
        "data.train.0.path={corpus}/shard",
        "data.validation.addresses.path={corpus}/shard",
        "data.validation.addresses.sequences=8",
        "data.split={{train: 0.7, validation: 0.3}}",
        "training.steps=2",
        "schedule.warmup_steps=1",
        "logging.every_steps=1",
    ],
)
def test_two_nodes_with_torchrun_train_the_quickstart_model(job):
    assert "2 nodes x 1 ranks" in job.said
    assert job.wait() == ("COMPLETED", 0), job.all_logs()
    assert last_step(job.run_dir) == 2
    assert len(job.launches) == 1
    assert len(expand(job.launches[0][2])) == 2


@scenario(place=0, overrides=["logging.ranks_every_steps=4"])
def test_two_nodes_with_a_task_a_rank(job):
    assert job.wait() == ("COMPLETED", 0), job.all_logs()
    assert newest(job) == LAST
    assert len(job.launches) == 1
    for rank in (0, 1):
        assert (job.logs() / f"rank_{rank:05d}.log").exists()
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    assert sum("ranks/probe_s_max" in line for line in lines) == 3
    for name in ("code/mixtron/launch/loop.py", "code/VERSION", "environment.txt", "config.yaml"):
        assert (job.run_dir / name).exists()


@scenario(
    place=0,
    launcher="torchrun",
    faults=[
        {"kind": "SIGUSR1", "step": 3, "rank": 1, "start": 1},
        {"kind": "SIGKILL", "step": 7, "rank": 1, "start": 2},
    ],
)
def test_a_signal_to_one_worker_and_a_killed_one_are_both_requeued(job, jobs):
    assert job.wait() == ("COMPLETED", 0), job.all_logs()
    assert [words[1] for words in job.launches] == ["nothing", "step_00000003", "step_00000004"]
    ends = [line for line in job.output().splitlines() if "ended with exit code" in line]
    assert [line.split("exit code ")[1].split()[0] for line in ends] == ["75", "76", "0"]
    assert_equals_straight(job, jobs)


@scenario(
    ranks=1,
    place=0,
    faults=[{"kind": "SIGSEGV", "step": 3}],
    overrides=["checkpoint.save_every_steps=100"],
)
def test_a_crash_without_progress_is_given_up_after_three_starts(job):
    state, code = job.wait()
    assert (state, code) == ("FAILED", 76), job.all_logs()
    assert len(job.launches) == 3
    assert "given up: 3 launches in a row ended without a checkpoint" in job.output()
    assert "SIGSEGV" in (job.logs() / "task_00000.log").read_text()
    assert "Segmentation fault" in (job.logs() / "rank_00000.log").read_text()


@scenario(ranks=1, faults=[{"kind": "raise", "step": 2}])
def test_an_exception_is_never_requeued(job):
    assert job.wait() == ("FAILED", 1), job.all_logs()
    assert len(job.launches) == 1
    assert "a fault in the program" in job.output()
    assert "failed (exit code 1)" in mixtron("status", str(job.run_dir))


@scenario(ranks=1, overrides=["slurm.sbatch_options=[--hold]"])
def test_bad_input_is_never_requeued(job):
    config = job.run_dir / "config.yaml"
    config.write_text(config.read_text().replace("tok.model", "gone.model"))
    job.cluster.ask("scontrol", "release", job.ids[0])
    assert job.wait() == ("FAILED", 2), job.all_logs()
    assert len(job.launches) == 1
    assert "gone.model" in job.output()


@scenario(
    faults=[{"kind": "sleep", "step": 4, "rank": 1, "start": 1}],
    place=0,
    overrides=["watchdog.step_s=15"],
)
def test_a_hang_is_found_named_and_requeued(job, jobs):
    assert job.wait() == ("COMPLETED", 0), job.all_logs()
    first = job.logs(0)
    verdict = (first / "hang" / "verdict").read_text()
    assert verdict.startswith("hang: rank 1 on n"), verdict
    assert "(step, step 4" in verdict
    assert "in _commit" in (first / "stacks_rank_00001.txt").read_text()
    assert "torch/distributed/" in (first / "stacks_rank_00000.txt").read_text()
    assert "ended with exit code 76" in job.output()
    assert_equals_straight(job, jobs)


@scenario(ranks=1, faults=[{"kind": "bad node", "start": 1}], overrides=["training.steps=2"])
def test_a_node_that_fails_the_preflight_is_left_out(job):
    assert job.wait() == ("COMPLETED", 0), job.all_logs()
    (_, _, bad, _), (_, _, other, _) = job.launches
    assert other != bad
    assert f"node {bad}: it is broken" in job.output()
    assert f"requeued without {bad}" in job.output()


@scenario(
    ranks=1,
    faults=[{"kind": "SIGUSR1", "step": 2, "start": 1}],
    overrides=["training.steps=4"],
    options=["--chain", "3"],
)
def test_a_chain_goes_on_after_a_stop_and_ends_when_finished(job):
    assert [job.wait(link) for link in job.ids] == [
        ("FAILED", 75),
        ("COMPLETED", 0),
        ("COMPLETED", 0),
    ], job.all_logs()
    assert [words[1] for words in job.launches] == ["nothing", "step_00000002"]
    assert "nothing to do" in job.output(job.ids[2])


@scenario(
    ranks=1,
    overrides=["training.steps=2"],
    options=["--sweep", "optimizer.lr=1e-3,2e-3"],
)
def test_a_sweep_is_an_array_with_a_folder_for_each_run(job):
    for number in range(2):
        assert job.wait(f"{job.ids[0]}_{number}") == ("COMPLETED", 0), job.all_logs()
    table = mixtron("status", str(job.run_dir)).splitlines()
    assert [line.split()[0] for line in table[1:]] == [
        f"{job.run_dir}/optimizer.lr={lr}" for lr in ("1e-3", "2e-3")
    ]
    assert all("finished" in line and "2/2" in line for line in table[1:])
