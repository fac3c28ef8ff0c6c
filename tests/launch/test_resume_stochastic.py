"""A resumed run draws the permutations that the straight run draws, hash for hash."""

from pathlib import Path

import pytest

from tests.helpers.jobs import history, small_config, write_config
from tests.helpers.ranks import run_on_ranks

STEPS = 6
STOP = 3


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
    folder.mkdir()
    return write_config(folder / "config.yaml", config)


def hashes_by_step(config_path: Path, stop_at: int | None) -> dict[int, list[tuple[int, int]]]:
    """Layer number and hash of each draw, in order, by step; saves and ends after `stop_at`."""
    from mixtron.launch import loop
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.setup_run import prepare
    from mixtron.megatron_ext.mixers.stochastic.module import Mixer
    from tests.launch.short_runs import watched

    config = load_config(config_path, [])
    run = prepare(config, *open_data(config)[1:])
    hashes = {}

    def on_draw(layer: int, hashes_2) -> None:
        hashes.setdefault(run.progress.step, []).append((layer, int(hashes_2[0])))

    for chunk in run.wrapped:
        for module in chunk.modules():
            if isinstance(module, Mixer):
                module.on_draw = on_draw
    with watched(run, stop_at):
        assert loop.train(run) == (0 if stop_at is None else 75)
    return hashes


@pytest.mark.parametrize("resample", ["step", "fixed"])
def test_a_resumed_run_draws_what_the_straight_run_draws(corpus, tmp_path, resample):
    """On two tensor ranks; the second half in processes that saw nothing of the first."""
    straight = write(corpus, tmp_path / "straight", resample)
    expected = run_on_ranks(2, hashes_by_step, straight, None)
    stopped = write(corpus, tmp_path / "stopped", resample)
    first = run_on_ranks(2, hashes_by_step, stopped, STOP)
    second = run_on_ranks(2, hashes_by_step, stopped, None)
    for rank in range(2):
        assert first[rank] | second[rank] == expected[rank] == expected[0]
        assert set(first[rank]).isdisjoint(second[rank])
    assert history(tmp_path / "stopped/run") == history(tmp_path / "straight/run")
