"""What `kernel: triton` of the mixers with a linear state refuses, before a model is built."""

import pytest

from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.gla.config import Config as GLA
from mixtron.megatron_ext.mixers.linear_attention.config import Config as Linear
from mixtron.megatron_ext.mixers.log_linear.config import Config as LogLinear
from mixtron.megatron_ext.mixers.mamba2.config import Config as Mamba2

OPTIONS = {"heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 64, "kernel": "triton"}


def linear(value_heads, **options):
    """These two have as many key heads as value heads."""
    return Linear(**options | {"heads": value_heads})


def gla(value_heads, **options):
    return GLA(**options | {"heads": value_heads})


CONFIGS = [Mamba2, LogLinear, linear, gla]


@pytest.mark.parametrize("config", CONFIGS)
def test_it_runs_in_bf16_on_a_gpu_alone(config):
    mixer = config(**OPTIONS)
    mixer.check_device("m", "cuda", "bf16")
    for device_type, precision in (("cpu", "bf16"), ("cuda", "fp32")):
        said = f"mixers.m.kernel=triton runs on a GPU in bf16, not on {device_type} in {precision}"
        with pytest.raises(ConfigError, match=said):
            mixer.check_device("m", device_type, precision)
    config(**OPTIONS | {"kernel": "chunk"}).check_device("m", "cpu", "fp32")


@pytest.mark.parametrize("config", CONFIGS)
def test_other_widths_are_refused(config):
    said = "kernel=triton takes key_dim and value_dim of 64 or 128, not 128 and 32"
    with pytest.raises(ValueError, match=said):
        config(**OPTIONS | {"value_dim": 32})


@pytest.mark.parametrize("config", [Mamba2, LogLinear])
def test_it_keeps_a_state_a_chunk(config):
    """Beside q and k, which the kernels take row by row."""
    triton, chunk = (
        config(**OPTIONS | {"kernel": kernel}).for_sequence_length("m", 4096)
        for kernel in ("triton", "chunk")
    )
    kept = [x.activation_bytes_per_token(1024, 1, 2) for x in (triton, chunk)]
    more_bytes = 2 * 2 * 128 * 2 + 4 * 128 * 64 / 64 * 2
    assert more_bytes <= kept[0] - kept[1] < more_bytes + 4 * 4 * 2
