"""Recurrent mixers of every kind and softmax attention in one model, under every layout."""

import pytest

from tests.contract.cases import CONTEXT_LAYOUTS, CP2, LAYOUTS, ONE_RANK, TP2, Case, Layout
from tests.contract.checks import check_agrees, check_no_leak, check_reshard


def name(layout: Layout) -> str:
    return layout.name


@pytest.mark.parametrize("layout", LAYOUTS + CONTEXT_LAYOUTS, ids=name)
def test_packed_ragged_documents(layout):
    check_agrees(Case("hybrid"), layout)


@pytest.mark.parametrize("layout", [ONE_RANK, CP2], ids=name)
def test_nothing_leaks_between_documents(layout):
    check_no_leak(Case("hybrid"), layout)


def test_checkpoint_changes_tensor_parallelism_and_back(tmp_path):
    check_reshard(Case("hybrid"), TP2, tmp_path)
