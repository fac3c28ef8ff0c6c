"""What every mixer must keep to besides computing the same under every layout."""

import pytest

from tests.contract.cases import (
    ALIGNED,
    CP2,
    DP2,
    MIXERS,
    ONE_RANK,
    PP2,
    RAGGED,
    TP2,
    TP2_SP,
    Case,
    Layout,
    layouts_of,
)
from tests.contract.checks import (
    check_documents_alone,
    check_layers_differ,
    check_no_leak,
    check_parameter_count,
    check_replicas_equal,
    check_reshard,
    check_resume,
    check_trained_weights,
    results_of,
    trained,
)

STEPS = 20


def name(value) -> str:
    return value.name if isinstance(value, Layout) else value


SPLIT = [mixer for mixer in MIXERS if CP2 in layouts_of(mixer)]


@pytest.mark.parametrize("mixer", MIXERS)
def test_documents_and_the_future_do_not_leak(mixer):
    check_no_leak(Case(mixer), ONE_RANK)


@pytest.mark.parametrize("documents", [RAGGED, ALIGNED], ids=["ragged", "aligned"])
@pytest.mark.parametrize("mixer", SPLIT)
def test_nothing_leaks_over_context_ranks(mixer, documents):
    check_no_leak(Case(mixer, documents=documents), CP2)


@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_documents_equal_documents_alone(mixer):
    check_documents_alone(Case(mixer))


REPLICA_PAIRS = [(mixer, TP2_SP) for mixer in MIXERS] + [("kla", TP2), ("softmax_attention", TP2)]


@pytest.mark.parametrize(("mixer", "layout"), REPLICA_PAIRS, ids=name)
def test_replicas_stay_bit_equal_and_on_one_ranks_course(mixer, layout):
    case = Case(mixer)
    check_replicas_equal(trained(case, layout, STEPS))
    check_trained_weights(case, layout, STEPS)


@pytest.mark.parametrize("mixer", MIXERS)
def test_layers_start_from_different_numbers(mixer):
    check_layers_differ(results_of(Case(mixer), ONE_RANK)[0])


@pytest.mark.parametrize("mixer", MIXERS)
def test_predicted_parameter_count_is_the_models(mixer):
    check_parameter_count(Case(mixer))


@pytest.mark.parametrize("mixer", MIXERS)
def test_checkpoint_changes_tensor_ranks_and_back(mixer, tmp_path):
    check_reshard(Case(mixer), TP2, tmp_path)


@pytest.mark.parametrize("mixer", MIXERS)
def test_training_goes_on_through_every_layout(mixer, tmp_path):
    context = [layout for layout in layouts_of(mixer) if layout == CP2]
    check_resume(Case(mixer), [ONE_RANK, TP2, PP2, *context, DP2, ONE_RANK], tmp_path)
