"""Layers recorded as CUDA graphs, on a GPU in bf16: not a bit differs."""

import pytest
import torch

from tests.megatron_ext.test_layer_graphs import trained

pytestmark = pytest.mark.gpu
HEADS = "heads: 2, kernel: triton"
STATE = f"{HEADS}, key_dim: 64, value_dim: 64"
ATTENTION = f"{HEADS}, kv_heads: 2, head_dim: 64"
MIXERS = {
    "kla": f"{{type: kla, {STATE.replace('key', 'value_heads: 2, key')}}}",
    "attention": f"{{type: softmax_attention, {ATTENTION}}}",
    "sa_swa": f"{{type: stochastic, {ATTENTION}, paths: sa+swa, window: 9}}",
    "path": "{type: path, heads: 2, kernel: triton, kv_heads: 1, head_dim: 128}",
    "path_fox": f"{{type: path, {ATTENTION}, forget_gate: true}}",
    "fox": f"{{type: fox, {ATTENTION}}}",
    "gla": f"{{type: gla, {STATE}}}",
    "linear": f"{{type: linear_attention, {STATE}}}",
    "mamba2": f"{{type: mamba2, {STATE.replace('key', 'value_heads: 2, key')}}}",
    "sd": f"{{type: sd_attention, {HEADS}, head_dim: 64}}",
}
PATTERNS = [*MIXERS, "kla, attention", "kla, path, sa_swa"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_bit_differs(pattern):
    mixers = ", ".join(f"{name}: {MIXERS[name]}" for name in pattern.split(", "))
    overrides = [f"model.pattern=[{pattern}]", f"mixers={{{mixers}}}"]
    overrides += [f"model.layers={max(2, pattern.count(',') + 1)}"]
    overrides += ["training.precision=bf16", "data.sequence_length=512"]
    logged, weights = trained("debug_kla", overrides)
    found, found_weights = trained("debug_kla", overrides, True)
    assert found == logged
    assert all(map(torch.equal, found_weights, weights))
