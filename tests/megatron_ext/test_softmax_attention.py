"""What the forms of softmax attention refuse, before a model is built."""

import pytest

from mixtron.megatron_ext.errors import ConfigError
from mixtron.megatron_ext.mixers.softmax_attention.config import Config


def mixer(**options) -> Config:
    return Config(**{"heads": 4, "kv_heads": 2, "head_dim": 64} | options)


@pytest.mark.parametrize("kernel", ["cudnn", "triton"])
def test_gpu_forms_run_in_bf16_on_a_gpu_without_a_window(kernel):
    mixer(kernel=kernel).check_device("m", "cuda", "bf16")
    for device_type, precision in (("cpu", "bf16"), ("cuda", "fp32")):
        said = (
            f"mixers.m.kernel={kernel} runs on a GPU in bf16, not on {device_type} in {precision}"
        )
        with pytest.raises(ConfigError, match=said):
            mixer(kernel=kernel).check_device("m", device_type, precision)
    with pytest.raises(ValueError, match=f"kernel={kernel} takes no window, and window=8"):
        mixer(kernel=kernel, window=8)
    mixer(window=8).check_device("m", "cpu", "fp32")


def test_widths_that_a_form_does_not_take_are_refused():
    with pytest.raises(ValueError, match="kernel=triton takes a head_dim of 64 or 128, not 96"):
        mixer(kernel="triton", head_dim=96)
    with pytest.raises(ValueError, match="kernel=cudnn takes a head_dim that is a multiple of 8"):
        mixer(kernel="cudnn", head_dim=60)


def test_cudnn_is_refused_where_bits_must_repeat():
    with pytest.raises(ConfigError, match="kernel=cudnn adds gradients in no"):
        mixer(kernel="cudnn").check_deterministic("m")
    mixer(kernel="triton").check_deterministic("m")
