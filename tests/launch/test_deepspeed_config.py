"""What `engine: deepspeed` takes, refuses and predicts, without running it."""

from pathlib import Path

import pytest

from mixtron.launch.checks import check
from mixtron.launch.config import load_config
from mixtron.launch.memory import host_memory, memory_per_rank
from mixtron.launch.traffic import bytes_sent_per_step
from mixtron.megatron_ext.config import ZeroOptimizationConfig
from mixtron.megatron_ext.errors import ConfigError

ATTENTION = Path(__file__).parents[2] / "configs" / "attention_400m.yaml"


def config(*overrides: str):
    return load_config(ATTENTION, ["engine=deepspeed", *overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("deepspeed.zero_stag=2", "did you mean 'zero_stage'"),
        ("deepspeed.zero_optimisation={stage: 2}", "did you mean 'zero_optimization'"),
        ("deepspeed.zero_optimization.overlap_com=true", "unknown key"),
        ("deepspeed.zero_optimization.reduce_bucket_sise=7", "did you mean 'reduce_bucket_size'"),
        ("deepspeed.train_batch_size=8", "set training.global_batch_tokens instead"),
        ("deepspeed.bf16={enabled: true}", "set training.precision instead"),
        ("deepspeed.zero_optimization.stage=2", "set deepspeed.zero_stage instead"),
        ("deepspeed.zero_optimization.overlap_comm=true", "set parallel.overlap instead"),
        ("deepspeed.zero_stage=4", "zero_stage"),
        ("deepspeed={zero_stage: 2, offload: optimizer+weights}", "needs zero_stage=3"),
    ],
)
def test_keys_that_are_refused(override, message):
    with pytest.raises(ConfigError, match=r"^deepspeed") as refusal:
        config(override)
    assert message in str(refusal.value)


def test_options_without_the_engine_are_refused():
    with pytest.raises(ConfigError, match="deepspeed: is for engine=deepspeed"):
        load_config(ATTENTION, ["deepspeed.zero_stage=1"])


@pytest.mark.parametrize("key", ["pipeline", "context"])
def test_parallelism_that_is_refused(key):
    with pytest.raises(ConfigError, match=rf"engine=deepspeed cannot run parallel.{key}=2: \w+"):
        check(config(f"parallel.{key}=2"), 2)


def test_parts_of_parameters_cannot_be_left_out():
    start = ["checkpoint.init_from=x", "checkpoint.init_allow=['output_layer.*']"]
    check(config(*start, "deepspeed.zero_stage=2"), 1)
    with pytest.raises(ConfigError, match=r"checkpoint.init_allow needs .* deepspeed.zero_stage=3"):
        check(config(*start, "deepspeed.zero_stage=3"), 1)


def test_every_option_is_one_of_deepspeeds():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    known = {field.alias or name for name, field in fields.items()}
    assert set(ZeroOptimizationConfig.model_fields) <= known


def test_memory_falls_with_the_stage_and_moves_to_the_host():
    def parts(stage: int, offload: str = "none") -> dict[str, float]:
        chosen = config(f"deepspeed={{zero_stage: {stage}, offload: {offload}}}", "model.layers=48")
        assert bool(host_memory(chosen, 8)) == (offload != "none")
        return memory_per_rank(chosen, 8)

    one, two, three = parts(1), parts(2), parts(3)
    assert two["gradients"] == pytest.approx(one["gradients"] / (8 + 1))
    assert two["optimizer"] == pytest.approx(one["optimizer"])
    assert three["gradients"] == pytest.approx(two["gradients"])
    assert parts(2, "optimizer")["optimizer"] == 0
    assert parts(3, "optimizer+weights")["weights"] < three["weights"]


def test_stages_two_and_three_reduce_every_micro_batch():
    def sent(stage: int, batch_tokens: int) -> float:
        overrides = [
            f"deepspeed.zero_stage={stage}",
            f"training.global_batch_tokens={batch_tokens}",
        ]
        return bytes_sent_per_step(config(*overrides), 2)["data"]

    assert sent(1, 2**19) == sent(1, 2**18)
    assert sent(2, 2**19) > 1.7 * sent(2, 2**18)
    assert sent(3, 2**19) == 2 * sent(3, 2**18)
