"""A resumed run draws the permutations that the straight run draws, hash for hash."""

import os
import signal
from pathlib import Path

import pytest

from tests.helpers.jobs import history, small_config, write_config
from tests.helpers.ranks import RankFailure, run_on_ranks

STEPS = 6
STOP = 3
KILL = 6


def write(corpus: Path, folder: Path, resample: str) -> Path:
    config = small_config(corpus, folder / "run")
    config["mixers"] = {
        "stochastic": {
            "type": "stochastic",
            "heads": 2,
            "kv_heads": 2,
            "head_dim": 8,
            "window": 8,
            "resample": resample,
        }
    }
    config["model"]["pattern"] = ["stochastic"]
    config["training"]["steps"] = STEPS
    config["checkpoint"]["save_every_steps"] = 2
    folder.mkdir()
    return write_config(folder / "config.yaml", config)


def draw_and_record(config_path: Path, stop_at: int | None, kill_at: int | None) -> None:
    """Writes step, layer and hash of each draw down; saves and ends after `stop_at`, or is ended by
    SIGKILL in step `kill_at`."""
    from mixtron.launch import loop
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.setup_run import prepare
    from mixtron.megatron_ext.mixers.stochastic.module import Mixer
    from tests.launch.short_runs import watched

    config = load_config(config_path, [])
    run = prepare(config, *open_data(config)[1:])
    record = config_path.parent / f"draws-{run.ranks.world_rank}"

    def on_draw(layer: int, hashes_2) -> None:
        step = run.progress.step + 1
        with record.open("a") as file:
            print(step, layer, int(hashes_2[0]), file=file)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for chunk in run.wrapped:
        for module in chunk.modules():
            if isinstance(module, Mixer):
                module.on_draw = on_draw
    with watched(run, stop_at) as (_, stop):
        assert loop.train(run, stop) == (0 if stop_at is None else 75)


def draws(folder: Path) -> list[list[str]]:
    """Of both ranks, in order."""
    return [(folder / f"draws-{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.parametrize("end", ["stopped", "killed"])
@pytest.mark.parametrize("resample", ["step", "fixed"])
def test_a_resumed_run_draws_what_the_straight_run_draws(corpus, tmp_path, resample, end):
    """On two tensor ranks; the second half in processes that saw nothing of the first."""
    straight = write(corpus, tmp_path / "straight", resample)
    run_on_ranks(2, draw_and_record, straight, None, None)
    expected = draws(tmp_path / "straight")
    assert expected[0] == expected[1]
    assert len(expected[0]) >= STEPS
    ended = write(corpus, tmp_path / "ended", resample)
    if end == "stopped":
        run_on_ranks(2, draw_and_record, ended, STOP, None)
    else:
        with pytest.raises(RankFailure):
            run_on_ranks(2, draw_and_record, ended, None, KILL)
    first = draws(tmp_path / "ended")
    run_on_ranks(2, draw_and_record, ended, None, None)
    for before, whole, wanted in zip(first, draws(tmp_path / "ended"), expected, strict=True):
        assert before == wanted[: len(before)]
        after = whole[len(before) :]
        assert after == wanted[-len(after) :]
        assert 0 < len(after) < len(wanted) <= len(before) + len(after)
    assert history(tmp_path / "ended/run") == history(tmp_path / "straight/run")
