"""The loop in ranks that are already running: what it skips, refuses and writes down."""

import math
from pathlib import Path

import pytest
import torch

from tests.helpers.jobs import rows, small_config, write_config
from tests.helpers.ranks import run_on_ranks


def write(corpus: Path, folder: Path, **training) -> Path:
    config = small_config(corpus, folder / "run")
    config["training"] |= {"steps": 8, **training}
    config["checkpoint"] = {"save_every_steps": 2}
    return write_config(folder / "config.yaml", config)


def train_with_faults(config_path: str, bad_steps: list[int], bad_rank: int) -> dict:
    """Trains; in `bad_steps` one rank's gradients are poisoned after backward."""
    from mixtron.launch import loop
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.setup_run import prepare

    config = load_config(config_path)
    run = prepare(config, *open_data(config)[1:])
    plain = loop.clip_and_step
    weights = []

    def poisoned(optimizer, clip, loss):
        weights.append(torch.cat([p.detach().flatten() for p in run.wrapped[0].parameters()]))
        if run.progress.step + 1 in bad_steps and run.ranks.world_rank == bad_rank:
            next(run.wrapped[0].parameters()).main_grad.fill_(math.nan)
        return plain(optimizer, clip, loss)

    loop.clip_and_step = poisoned
    try:
        code = loop.train(run)
        failure = None
    except loop.TrainingError as error:
        code, failure = error.exit_code, str(error)
    finally:
        loop.clip_and_step = plain
    unchanged = [
        step + 1
        for step in range(len(weights) - 1)
        if torch.equal(weights[step], weights[step + 1])
    ]
    return {
        "code": code,
        "failure": failure,
        "unchanged_after": unchanged,
        "skipped": run.progress.skipped_steps,
        "finite": all(bool(w.isfinite().all()) for w in weights),
    }


def test_a_step_with_bad_gradients_is_skipped_on_every_rank(corpus, tmp_path):
    config = write(corpus, tmp_path)
    results = run_on_ranks(2, train_with_faults, str(config), [4], 1)
    for result in results:
        assert result["code"] == 0
        assert result["skipped"] == 1
        assert result["unchanged_after"] == [4]
        assert result["finite"]
    logged = {r["step"]: r for r in rows(tmp_path / "run") if "train/loss" in r}
    assert math.isnan(logged[4]["train/grad_norm"])
    assert logged[3]["train/skipped_steps"] == 0
    assert logged[8]["train/skipped_steps"] == 1


def test_endless_skipping_stops_and_keeps_the_last_good_checkpoint(corpus, tmp_path):
    config = write(corpus, tmp_path, max_skipped_steps=2)
    results = run_on_ranks(2, train_with_faults, str(config), [4, 5, 6, 7], 0)
    for result in results:
        assert result["code"] == 1
        assert "not finite in steps 4 to 6" in result["failure"]
        assert "the last good step is 2" in result["failure"]
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert names == ["step_00000002"]


def train_until_unreadable(config_path: str, readable: int) -> tuple[str, int]:
    """The error, and the last step that counts, where no more than so many samples can be read."""
    from mixtron.data_prep.errors import DataError
    from mixtron.launch import loop
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.setup_run import prepare

    config = load_config(config_path, ["parallel.tensor=1", "parallel.sequence=false"])
    run = prepare(config, *open_data(config)[1:])
    plain, count = run.data.read, 0

    def read(reference):
        nonlocal count
        count += 1
        if count > readable:
            raise DataError("shard.bin: unreadable")
        return plain(reference)

    run.data.read = read
    with pytest.raises(DataError) as caught:
        loop.train(run)
    run.saver.finish()
    return str(caught.value), run.progress.step


def test_what_cannot_be_read_ahead_costs_no_step_before_it(corpus, tmp_path):
    config = write(corpus, tmp_path)
    found = run_on_ranks(1, train_until_unreadable, str(config), 4 * 4)
    assert found == [("shard.bin: unreadable", 4)]
    assert (tmp_path / "run/checkpoints/step_00000004").exists()


def losses(config_path: str, overrides: list[str]) -> list[float]:
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.loop import train_step
    from mixtron.launch.setup_run import prepare

    config = load_config(config_path, overrides)
    run = prepare(config, *open_data(config)[1:])
    return [train_step(run)["train/loss"] for _ in range(4)]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ["training.micro_batch_sequences=4"]),
        (2, ["training.micro_batch_sequences=2"]),
        (2, ["parallel.tensor=2", "parallel.sequence=true"]),
        (2, ["parallel.pipeline=2"]),
        (2, ["parallel.context=2"]),
    ],
    ids=["one micro-batch", "data 2", "tensor 2", "pipeline 2", "context 2"],
)
def test_every_layout_trains_alike(corpus, tmp_path, world, overrides):
    config = write(corpus, tmp_path)
    plain = ["model.dropout=0", "parallel.tensor=1", "parallel.sequence=false"]
    reference = run_on_ranks(1, losses, str(config), plain)[0]
    for result in run_on_ranks(world, losses, str(config), plain + overrides):
        # fp32 sums in another order, through four optimizer steps.
        assert result == pytest.approx(reference, rel=2e-6)


def history_of(config_path: str, overrides: list[str]) -> list[tuple]:
    """Trains to the end, from where the run folder stands; returns all that the run logged."""
    from mixtron.launch import loop
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.setup_run import prepare
    from tests.helpers.jobs import history

    config = load_config(config_path, overrides)
    assert loop.train(prepare(config, *open_data(config)[1:])) == 0
    return history(Path(config.run_dir))


def test_stochastic_layers_resume_with_the_permutations_of_their_steps(corpus, tmp_path):
    """Debug mode on: their hashes are compared at every step."""
    config = small_config(corpus, tmp_path / "straight")
    heads = {"heads": 2, "kv_heads": 2, "head_dim": 8, "window": 9}
    config["mixers"] = {
        "kla": {"type": "stochastic", **heads},
        "attention": config["mixers"]["kla"],
    }
    config["training"] |= {"steps": 8, "debug": True, "eval_every_steps": 4}
    config["schedule"] = {"type": "constant"}
    path = str(write_config(tmp_path / "config.yaml", config))
    straight = run_on_ranks(2, history_of, path, [])[0]
    again = [f"run_dir={tmp_path / 'resumed'}"]
    run_on_ranks(2, history_of, path, [*again, "training.steps=4"])
    again.append("checkpoint.allow_changes=[training.steps]")
    assert run_on_ranks(2, history_of, path, again)[0] == straight
    one_order = [f"run_dir={tmp_path / 'fixed'}", "mixers.kla.resample=fixed"]
    assert run_on_ranks(2, history_of, path, one_order)[0] != straight


def stop_on_one_rank(config_path: str, after_preparing: bool) -> tuple[int, int]:
    """Exit code and last step when the time of rank 1 alone is up."""
    from mixtron.launch import loop
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.setup_run import prepare
    from mixtron.launch.signals import StopFlag, Stopped

    config, stop = load_config(config_path), StopFlag()
    limit_s = 0.0 if torch.distributed.get_rank() == 1 else 3600.0
    if not after_preparing:
        stop.limit_duration(limit_s)
    try:
        run = prepare(config, *open_data(config)[1:], stop)
        stop.limit_duration(limit_s)
        return loop.train(run, stop), run.progress.step
    except Stopped as stopped:
        return stopped.exit_code, 0


@pytest.mark.parametrize(("after_preparing", "step"), [(False, 0), (True, 1)])
def test_a_time_limit_of_one_rank_stops_all_at_the_same_step(
    corpus, tmp_path, after_preparing, step
):
    config = write(corpus, tmp_path)
    assert run_on_ranks(2, stop_on_one_rank, str(config), after_preparing) == [(75, step)] * 2
    saved = [p.name for p in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert saved == ([f"step_{step:08d}"] if step else [])
