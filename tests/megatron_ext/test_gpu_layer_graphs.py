"""Layers recorded as CUDA graphs, on a GPU in bf16: not a bit differs."""

import pytest
import torch

from tests.megatron_ext.test_layer_graphs import trained

pytestmark = pytest.mark.gpu
HEADS = "heads: 2, kernel: triton"
MIXERS = {
    "kla": f"{{type: kla, {HEADS}, value_heads: 2, key_dim: 64, value_dim: 64}}",
    "attention": f"{{type: softmax_attention, {HEADS}, kv_heads: 2, head_dim: 64}}",
    "sa_swa": f"{{type: stochastic, {HEADS}, kv_heads: 2, head_dim: 64, paths: sa+swa, window: 9}}",
}


@pytest.mark.parametrize("name", MIXERS)
def test_no_bit_differs(name):
    overrides = [f"model.pattern=[{name}]", f"mixers={{{name}: {MIXERS[name]}}}"]
    overrides += ["training.precision=bf16", "data.sequence_length=128"]
    logged, weights = trained("debug_kla", overrides)
    found, found_weights = trained("debug_kla", overrides, True)
    assert found == logged
    assert all(map(torch.equal, found_weights, weights))
