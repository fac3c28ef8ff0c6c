"""What mixers report beside the loss: the same under every layout, in both logs."""

import math
from pathlib import Path

import pytest

from mixtron.launch.config import load_config
from tests.helpers.jobs import SEQUENCE, rows, small_config, write_config
from tests.helpers.ranks import run_on_ranks
from tests.launch.conftest import MIXERS


def write(corpus: Path, folder: Path) -> Path:
    config = small_config(corpus, folder / "run")
    mixer = {"type": "log_linear", "heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8}
    config["mixers"] |= {
        "adaptive": {**mixer, "lambda": "linear"},
        "fixed": {**mixer, "base": "gated_delta", "lambda": "fixed"},
    }
    config["mixers"] |= {name: MIXERS[name] for name in ("path_fox", "gated_sa", "sd")}
    pattern = ["adaptive", "fixed", "kla", "path_fox", "gated_sa", "sd"]
    config["model"] |= {"pattern": pattern, "layers": len(pattern), "dropout": 0.0}
    config["parallel"] = {}
    config["training"] |= {"steps": 4, "micro_batch_sequences": 2}
    config["logging"] = {"every_steps": 2}
    return write_config(folder / "config.yaml", config)


def reported(config_path: str, overrides: list[str]) -> list[dict[str, float]]:
    from mixtron.launch.data import open_data
    from mixtron.launch.loop import train_step
    from mixtron.launch.setup_run import prepare

    config = load_config(config_path, overrides)
    run = prepare(config, *open_data(config)[1:])
    values = [train_step(run) for _ in range(2)]
    return [{n: x for n, x in v.items() if "/layer_" in n} for v in values]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, ["parallel.tensor=2", "parallel.sequence=true"]),
        (2, ["parallel.pipeline=2", "training.micro_batch_sequences=1"]),
        (2, ["parallel.context=2"]),
        (2, ["training.recompute=full"]),
    ],
    ids=["tensor 2", "pipeline 2", "context 2", "data 2 recompute"],
)
def test_means_do_not_depend_on_the_layout(corpus, tmp_path, world, overrides):
    config = write(corpus, tmp_path)
    [[unlogged, reference]] = run_on_ranks(1, reported, str(config), [])
    assert unlogged == {}
    levels = 1 + math.ceil(math.log2(SEQUENCE))
    names = {f"lambda_all/layer_{n}/level_{i}" for n in (1, 2) for i in range(levels)}
    names |= {"kla_step_size/layer_3", "kla_decay/layer_3", "path_beta/layer_4"}
    names |= {"forget_gate/layer_4", "sa_gate/layer_5", "swa_gate/layer_5", "sd_damping/layer_6"}
    assert names <= reference.keys()
    # A head's number does not depend on the token, and has hardly moved.
    assert reference["lambda_all/layer_2/level_3"] == pytest.approx(0.9992, abs=0.02)
    assert reference["lambda_scored/layer_1/level_0"] != reference["lambda_all/layer_2/level_0"]
    for _, found in run_on_ranks(world, reported, str(config), overrides):
        # fp32 sums in another order, after an optimizer step.
        assert found == pytest.approx(reference, rel=1e-5)


def train_all(config_path: str) -> int:
    from mixtron.launch.data import open_data
    from mixtron.launch.loop import train
    from mixtron.launch.setup_run import prepare

    config = load_config(config_path)
    return train(prepare(config, *open_data(config)[1:]))


def test_means_are_in_both_logs(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run_on_ranks(1, train_all, str(write(corpus, tmp_path))) == [0]
    logged = [r for r in rows(tmp_path / "run") if "train/loss" in r]
    assert [r["step"] for r in logged] == [2, 4]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    name = "lambda_all/layer_1/level_4"
    for row, event in zip(logged, board.Scalars(name), strict=True):
        assert event.value == pytest.approx(row[name], rel=1e-6)
