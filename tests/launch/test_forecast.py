"""The forecast, by hand."""

from pathlib import Path

import pytest

from mixtron.launch.config import load_config
from mixtron.launch.estimate import parameters
from mixtron.launch.forecast import Cluster, forecast, with_tokens_per_gpu
from mixtron.megatron_ext.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
RATE = 100_000.0


def config(*overrides: str, gpus: int, tokens: int = 65_536):
    loaded = load_config(CONFIGS / "attention_400m.yaml", list(overrides))
    return with_tokens_per_gpu(loaded, gpus, tokens)


def test_one_gpu_is_as_measured():
    one = forecast(config(gpus=1), 1, RATE, Cluster())
    assert one.step_s == pytest.approx(65_536 / RATE)
    assert one.efficiency == 1


ONE_BUCKET = "parallel.bucket_parameters=400_000_000"


def test_one_bucket_is_never_hidden():
    total = sum(parameters(config(gpus=256)).values())
    many = forecast(config(ONE_BUCKET, gpus=256), 256, RATE, Cluster(hop_us=0))
    sent = total * (4 + 2) * 255 / 256
    assert many.exposed_s == {"data": pytest.approx(sent / (400e9 / 8 * 0.8))}
    assert many.exposed_s == pytest.approx(many.sent_s)


def test_hops_count_once_a_node_and_collective():
    def exposed(hop_us: float) -> float:
        one = config(ONE_BUCKET, gpus=256)
        return forecast(one, 256, RATE, Cluster(hop_us=hop_us)).exposed_s["data"]

    assert exposed(10) - exposed(0) == pytest.approx(2 * 255 / 8 * 10e-6)


def test_what_backward_hides_is_not_exposed():
    slow = forecast(config(gpus=64), 64, RATE / 10, Cluster())
    total = sum(parameters(config(gpus=64)).values())
    buckets = total // 40_000_000
    assert slow.exposed_s["data"] == pytest.approx(slow.sent_s["data"] / buckets)


def test_tensor_ranks_wait_and_the_pipeline_has_a_bubble():
    pair = forecast(config("parallel={tensor: 2}", gpus=2), 2, RATE, Cluster())
    gathers = 24 * 8 + 2 + 2
    sent = 4 * gathers * 8 * 4096 * 1024 * 2 / 2
    assert pair.exposed_s == {"tensor": pytest.approx(sent / (450e9 * 0.8))}
    four = forecast(config("parallel={pipeline: 4}", gpus=4), 4, RATE, Cluster())
    assert four.compute_s == pytest.approx(65_536 / RATE * (1 + 3 / 8))


def test_a_config_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.tensor=3"):
        forecast(config("parallel={tensor: 3}", gpus=64), 64, RATE, Cluster())
