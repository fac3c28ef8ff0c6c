"""Padding the vocabulary of 101 changes nothing, even where a rank holds nothing but padding."""

import pytest

from tests.contract.cases import ONE_RANK, TP2, TP2_SP, Case, Layout
from tests.contract.checks import check_padding


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("layout", "vocab_multiple"),
    [(ONE_RANK, 128), (TP2, 2), (TP2, 128), (TP2, 256), (TP2_SP, 128)],
    ids=lambda value: value.name if isinstance(value, Layout) else str(value),
)
def test_padding_takes_no_part(layout, vocab_multiple, tied):
    padded = Case("softmax_attention", vocab_multiple=vocab_multiple, tied=tied)
    check_padding(padded, layout, Case("softmax_attention", vocab_multiple=1, tied=tied))
