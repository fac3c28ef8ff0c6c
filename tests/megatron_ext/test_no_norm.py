"""A model of S-D attention trains without any norm: the loss falls, gradients stay bounded."""

from pathlib import Path

from mixtron.megatron_ext.mixers.sd_attention.config import Config as SDAttention
from tests.helpers.jobs import make_corpus, small_config, write_config
from tests.helpers.ranks import run_on_ranks

STEPS = 60


def train(config_path: Path) -> list[dict[str, float]]:
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.loop import train_step
    from mixtron.launch.setup_run import prepare

    config = load_config(config_path)
    run = prepare(config, *open_data(config)[1:])
    return [train_step(run) for _ in range(STEPS)]


def test_sd_attention_without_norms(tmp_path):
    make_corpus(tmp_path)
    config = small_config(tmp_path, tmp_path / "run")
    config["model"] |= {"layers": 6, "pattern": ["sd"], "norm": "none", "dropout": 0.0}
    config["mixers"] = {"sd": SDAttention(heads=2, head_dim=16).model_dump()}
    config["training"] |= {"steps": STEPS}
    config["parallel"] = {}
    [steps] = run_on_ranks(1, train, write_config(tmp_path / "config.yaml", config))
    losses = [step["train/loss"] for step in steps]
    norms = [step["train/grad_norm"] for step in steps]
    # From the uniform guess over 600 tokens, 6.4, and never above it by much.
    assert sum(losses[-10:]) / 10 < losses[0] - 1
    assert max(losses) < losses[0] + 0.5
    assert max(norms) < 20
