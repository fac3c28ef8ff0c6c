"""The script's own checks, on two CPU ranks: they pass on sound code and see faults."""

import pytest

from tests.contract.cases import TP2, Layout
from tests.helpers.ranks import run_on_ranks
from tests.multi_gpu import parity
from tests.multi_gpu.cases import Options
from tests.multi_gpu.permutations import compare as compare_permutations

MIXER = "softmax_attention"


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> Options:
    options = Options(2, "cpu", tmp_path_factory.mktemp("parity"))
    run_on_ranks(1, parity.keep_reference, MIXER, parity.subjects(options)[MIXER], options)
    return options


@pytest.mark.parametrize("layout", parity.layouts(2), ids=lambda layout: layout.name)
def test_sound_layouts_pass(layout, options):
    subject = parity.subjects(options)[MIXER]
    for found in run_on_ranks(2, parity.compare, MIXER, subject, layout, options):
        assert found["compared"] > 10  # type: ignore[operator]


@pytest.mark.parametrize(("fault", "layout"), parity.CONTROLS.items(), ids=list(parity.CONTROLS))
def test_faults_are_found(fault, layout, options):
    for found in run_on_ranks(2, parity.catch, fault, layout, options):
        assert found["found"]


def test_all_gpus_are_used_whatever_their_number():
    for gpus in (2, 4, 8):
        assert {layout.world_size for layout in parity.layouts(gpus)} == {gpus}


@pytest.mark.parametrize("layout", [TP2, Layout("one rank")], ids=lambda layout: layout.name)
def test_a_rank_that_draws_other_permutations_is_seen(layout, options):
    for found in run_on_ranks(2, compare_permutations, layout, options):
        assert "draw other permutations" in str(found["seen"])
