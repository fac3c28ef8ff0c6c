"""Parts computed again on a GPU in bf16, where their kernels are others than on a CPU: each bit as
when they are kept."""

import pytest
import torch

from tests.megatron_ext.test_layer_graphs import trained

pytestmark = pytest.mark.gpu
KLA = "{type: kla, heads: 2, kernel: triton, value_heads: 2, key_dim: 64, value_dim: 64}"
GIVEN = [
    "model.pattern=[kla]",
    f"mixers={{kla: {KLA}}}",
    "training.precision=bf16",
    "data.sequence_length=128",
]


@pytest.fixture(scope="module")
def kept():
    return trained("debug_kla", GIVEN)


@pytest.mark.parametrize("layer_graphs", [False, True])
@pytest.mark.parametrize("parts", ["[norm, gate, mlp_act]", "[norm, conv, gate, mlp_act]"])
def test_no_bit_differs(kept, parts, layer_graphs):
    logged, weights = kept
    found, found_weights = trained(
        "debug_kla", [*GIVEN, f"training.recompute={parts}"], layer_graphs
    )
    assert found == logged
    assert all(map(torch.equal, found_weights, weights))
