"""The contract fails when it should: each fault is put into working code and must be found."""

import pytest

from tests.contract.cases import MIXER_INDEPENDENT, MIXERS, ONE_RANK, TP2, TP2_SP, Case, Layout
from tests.contract.checks import (
    check_agrees,
    check_documents_alone,
    check_gradient_norm,
    check_gradients,
    check_no_leak,
    check_replicas_equal,
    check_reshard,
    check_trained_weights,
    results_of,
    trained,
)

either_way = pytest.mark.parametrize("layout", [TP2, TP2_SP], ids=lambda layout: layout.name)


def against_one_rank(case: Case, layout: Layout):
    """A sound reference beside the faulty ranks."""
    return results_of(Case(case.mixer), ONE_RANK)[0], results_of(case, layout)


@either_way
def test_partial_gradient_of_a_replicated_parameter(layout):
    faulty = Case("softmax_attention", fault="partial replicated gradient")
    with pytest.raises(AssertionError, match=r"gradients differ.*\n.*q_norm_weight"):
        check_gradients(*against_one_rank(faulty, layout))
    with pytest.raises(AssertionError, match="norm_weight drifts apart"):
        check_replicas_equal(trained(faulty, layout, 2))
    with pytest.raises(AssertionError, match="norm_weight after 2 steps"):
        check_trained_weights(faulty, layout, 2)


@pytest.mark.parametrize("mixer", MIXERS)
def test_leak_over_a_document_boundary(mixer):
    leaky = Case(mixer, fault="document leak")
    with pytest.raises(AssertionError, match="document 0 reaches tokens"):
        check_no_leak(leaky, ONE_RANK)
    # The first too: what a mixer draws for the whole stream is not what it draws for a document.
    with pytest.raises(AssertionError, match=r"document [0123]: error"):
        check_documents_alone(leaky)


@pytest.mark.parametrize(
    ("mixer", "layout"),
    [(mixer, TP2_SP) for mixer in MIXERS] + [(mixer, TP2) for mixer in MIXER_INDEPENDENT],
    ids=lambda value: getattr(value, "name", value),
)
def test_shard_without_megatrons_mark(mixer, layout):
    unmarked = Case(mixer, fault="unmarked shard")
    reference, results = against_one_rank(unmarked, layout)
    with pytest.raises(AssertionError, match="gradient norm"):
        check_gradient_norm(unmarked.config(layout).optimizer.clip_grad_norm, reference, results)


def test_mean_of_micro_batch_means():
    faulty = Case("softmax_attention", fault="mean of means")
    with pytest.raises(AssertionError, match="gradients differ"):
        check_gradients(*against_one_rank(faulty, ONE_RANK))


def test_layout_dependent_initial_weights():
    faulty = Case("softmax_attention", fault="rank's own initial weights")
    with pytest.raises(AssertionError, match="rank 1 draws"):
        check_agrees(faulty, TP2)


def test_fused_projection_stored_as_one_matrix(tmp_path):
    faulty = Case("softmax_attention", fault="fused checkpoint key")
    with pytest.raises(AssertionError, match=r"rank \d loads .*in_proj.weight differently"):
        check_reshard(faulty, TP2, tmp_path)
