"""That learning works at all: small models solve MQAR at its easy setting, in the ordinary loop."""

import pytest

from tests.helpers.jobs import write_config
from tests.helpers.ranks import run_on_ranks

MIXERS = {
    "attention": {"type": "softmax_attention", "heads": 2, "kv_heads": 2, "head_dim": 32},
    "kla": {"type": "kla", "heads": 2, "value_heads": 2, "key_dim": 16, "value_dim": 32},
}


def config_of(mixer: str, run_dir: str) -> dict:
    return {
        "name": "mqar",
        "run_dir": run_dir,
        "model": {
            "layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 64,
            "vocab_size": 64,
            "vocab_multiple": 32,
            "pattern": [mixer],
            "init_std": 0.1,
        },
        "mixers": {mixer: MIXERS[mixer]},
        "data": {
            "sequence_length": 32,
            "synthetic": {"task": "mqar", "pairs": 4, "vocab_size": 64},
        },
        "optimizer": {"lr": 3e-3},
        "schedule": {"type": "constant", "warmup_steps": 20},
        "training": {
            "steps": 300,
            "global_batch_tokens": 2048,
            "micro_batch_sequences": 64,
            "precision": "fp32",
        },
        "checkpoint": {"save_every_steps": 300},
        "logging": {"every_steps": 50, "tensorboard": False},
    }


def accuracy_after_training(path: str) -> list[float]:
    """Before training, and after it on the same and on twice the length."""
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.loop import train
    from mixtron.launch.setup_run import prepare
    from mixtron.launch.synthetic.accuracy import evaluate_settings
    from mixtron.launch.synthetic.grid import settings_of

    config = load_config(path)
    run = prepare(config, *open_data(config)[1:])
    settings = settings_of(run.data.task, 32, {"length": [32, 64]}, "mqar")

    def accuracies() -> list[float]:
        rows = evaluate_settings(
            run.wrapped[0], config.model, run.ranks, settings, sequences=100, seed=1
        )
        return [row["accuracy"] for row in rows]

    before = accuracies()[0]
    assert train(run) == 0
    return [before, *accuracies()]


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_small_model_solves_mqar(tmp_path, mixer):
    path = write_config(tmp_path / "config.yaml", config_of(mixer, str(tmp_path / "run")))
    [(before, after, longer)] = run_on_ranks(1, accuracy_after_training, str(path), timeout_s=500)
    assert before < 0.1
    # Naming one of the values that were told gives 1/4; a single layer cannot do more.
    assert after > 0.95, f"{mixer}: {after}"
    assert longer > 0.5, f"{mixer} at twice the length: {longer}"
