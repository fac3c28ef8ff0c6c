"""What a micro-batch says of itself."""

import pytest

from mixtron.megatron_ext.batch import make_batch


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([64], 1),
        ([10, 22, 32, 64], 2),
        ([32, 16, 16, 32, 1, 31], 4),
        ([1] * 200, 50),  # 200 and 100 are more rows than any use
        ([60, 4, 63, 1, 62, 2], 3),
        ([63, 65], 1),
    ],
)
def test_rows_are_equal_parts_that_each_begin_a_document(lengths, rows):
    assert make_batch(lengths, step=0, device="cpu").rows == rows


def test_a_context_rank_has_one_row():
    batch = make_batch([32, 32], step=0, device="cpu", context_rank=1, context_size=2)
    assert batch.rows == 1
