"""The benchmark of whole steps, on CPU ranks."""

import math
from pathlib import Path

import pytest

from mixtron.launch.config import load_config
from mixtron.megatron_ext.errors import ConfigError
from tests.helpers.ranks import run_on_ranks
from tests.multi_gpu.bench import build, measure

CONFIG = Path(__file__).parents[2] / "configs/debug_kla.yaml"


def measured(overrides: list[str]) -> tuple[int, dict[str, float]]:
    """Micro-batches a rank has, and what was measured."""
    bench = build(load_config(CONFIG, overrides))
    return len(bench.micro_batches), measure(bench, steps=1)


@pytest.mark.parametrize(("parallel", "expected"), [("{}", 2), ("{tensor: 2}", 4)])
def test_a_step_takes_the_global_batch(parallel, expected):
    for count, values in run_on_ranks(2, measured, [f"parallel={parallel}"]):
        assert count == expected
        assert values["speed/tokens_per_s"] == pytest.approx(512 / values["speed/step_s"])
        assert math.isfinite(values["memory/peak_gib"])


def refused(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        build(load_config(CONFIG, overrides))
    return str(error.value)


def test_what_the_device_cannot_run_is_refused():
    mixer = "{type: kla, heads: 4, value_heads: 4, key_dim: 64, value_dim: 64, kernel: triton}"
    overrides = [f"mixers.kla={mixer}", "training.precision=bf16"]
    [said] = run_on_ranks(1, refused, overrides)
    assert "mixers.kla.kernel=triton" in said
