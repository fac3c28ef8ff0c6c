"""Every file under configs/ is one that a person can run."""

from pathlib import Path

import pytest

from mixtron.launch.checks import check
from mixtron.launch.config import dump_config, load_config
from mixtron.launch.estimate import forward_flops_per_token, parameters
from mixtron.launch.memory import memory_per_rank
from mixtron.launch.traffic import bytes_sent_per_step
from mixtron.launch.validate import default_world_size
from tests.helpers.ranks import run_on_ranks

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
DEBUG_CONFIGS = [path for path in CONFIGS if path.name.startswith("debug_")]


def name(path: Path) -> str:
    return path.stem


def test_there_are_configs():
    assert CONFIGS
    assert DEBUG_CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_config_fits_its_ranks(path):
    config = load_config(path)
    check(config, default_world_size(config))


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_dump_of_a_load_is_a_fixed_point(path, tmp_path):
    config = load_config(path)
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    dump_config(config, first)
    assert load_config(first) == config
    dump_config(load_config(first), second)
    assert second.read_text() == first.read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_config_is_named_like_its_file_and_says_how_to_run_it(path):
    assert load_config(path).name == path.stem
    assert path.read_text().startswith("#")


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_every_mixer_in_use_has_its_costs(path):
    config = load_config(path)
    world_size = default_world_size(config)
    used = set(config.model.layer_mixers)
    assert used <= forward_flops_per_token(config).keys()
    assert used == {part.split(".")[0] for part in parameters(config) if "." in part}
    assert all(count > 0 for count in memory_per_rank(config, world_size).values())
    assert all(sent > 0 for sent in bytes_sent_per_step(config, world_size).values())


@pytest.mark.parametrize("path", DEBUG_CONFIGS, ids=name)
def test_predicted_parameters_are_the_built_models(path):
    [built] = run_on_ranks(1, count_parameters, path)
    assert sum(parameters(load_config(path)).values()) == built


def count_parameters(path: Path) -> int:
    from mixtron.megatron_ext.model import build_model
    from mixtron.megatron_ext.parallel import init_distributed, init_model_parallel

    config = load_config(path)
    ranks = init_model_parallel(seed=1, device=init_distributed())
    chunks = build_model(
        config.model, config.mixers, config.parallel, ranks, seed=1, bf16=False, max_tokens=64
    )
    return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
