import shutil
from pathlib import Path

import pytest

from tests.helpers.jobs import Job, make_corpus, small_config, write_config
from tests.helpers.ranks import run_on_ranks

MIXERS = {
    "kla": {"type": "kla", "heads": 2, "value_heads": 2, "key_dim": 8, "value_dim": 8},
    "path_fox": {"type": "path", "heads": 2, "kv_heads": 2, "head_dim": 8, "forget_gate": True},
    "gated_sa": {
        "type": "stochastic",
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "window": 8,
        "decode_capacity": 32,
    },
    "sd": {"type": "sd_attention", "heads": 2, "head_dim": 8},
    "log_linear": {
        "type": "log_linear",
        "heads": 2,
        "value_heads": 2,
        "key_dim": 8,
        "value_dim": 8,
    },
    "attention": {"type": "softmax_attention", "heads": 2, "kv_heads": 2, "head_dim": 8},
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with tok.model and shard.{bin,idx,json}."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def every_mixer_run(corpus, tmp_path_factory) -> Path:
    """A run with layers of many kinds, killed after a step that was not saved, and resumed."""
    folder = tmp_path_factory.mktemp("every_mixer") / "run"
    config = small_config(corpus, folder)
    config["mixers"] = MIXERS
    config["model"] |= {"pattern": list(MIXERS), "layers": len(MIXERS)}
    config["parallel"] = {}
    config["training"] |= {"steps": 6, "eval_every_steps": 2}
    config["checkpoint"] = {"save_every_steps": 4}
    path = str(write_config(folder.with_name("config.yaml"), config))
    assert run_on_ranks(1, train_as_configured, path) == [0]
    shutil.rmtree(folder / "checkpoints" / "step_00000006")
    assert run_on_ranks(1, train_as_configured, path) == [0]
    return folder


def train_as_configured(config_path: str) -> int:
    from mixtron.launch.config import load_config
    from mixtron.launch.data import open_data
    from mixtron.launch.loop import train
    from mixtron.launch.setup_run import prepare

    config = load_config(config_path)
    return train(prepare(config, *open_data(config)[1:]))


@pytest.fixture
def start_job():
    """Starts a `Job`; whatever becomes of the test, none is left running."""
    jobs: list[Job] = []

    def start(config: Path, run_dir: Path, overrides: list[str]) -> Job:
        jobs.append(Job(config, run_dir, overrides=overrides).start())
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
