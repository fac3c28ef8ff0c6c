"""Every choice of block norm trains the same model under every layout, and says what it costs."""

import pytest

from tests.contract.cases import PP2, TP2, TP2_SP, Case, Layout
from tests.contract.checks import (
    check_agrees,
    check_parameter_count,
    check_replicas_equal,
    check_reshard,
    trained,
)

NORMS = ["layernorm", "none"]


def name(value) -> str:
    return value.name if isinstance(value, Layout) else value


@pytest.mark.parametrize("layout", [TP2_SP, PP2], ids=name)
@pytest.mark.parametrize("norm", NORMS)
def test_layouts_agree(norm, layout):
    check_agrees(Case("sd_attention", norm=norm), layout)


@pytest.mark.parametrize("norm", NORMS)
def test_predicted_parameter_count_is_the_models(norm):
    check_parameter_count(Case("sd_attention", norm=norm))


def test_replicas_stay_bit_equal():
    check_replicas_equal(trained(Case("sd_attention", norm="layernorm"), TP2_SP, 5))


@pytest.mark.parametrize("norm", NORMS)
def test_checkpoint_changes_tensor_ranks_and_back(norm, tmp_path):
    check_reshard(Case("sd_attention", norm=norm), TP2, tmp_path)
