"""Cutting a range of elements into rectangles."""

import itertools

import pytest
import torch

from mixtron.megatron_ext.optimizer_state import blocks


@pytest.mark.parametrize("shape", [(7,), (3, 5), (5, 1), (1, 4), (3, 2, 4), (2, 3, 2, 2)])
def test_blocks_are_the_range_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, end in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        cut = [
            whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].flatten()
            for offset, size in blocks(shape, start, end)
        ]
        assert torch.equal(
            torch.cat([torch.tensor([], dtype=torch.long), *cut]), torch.arange(start, end)
        )


def test_a_matrix_needs_at_most_three():
    shape = (40, 30)
    for start, end in itertools.combinations(range(0, 1200, 7), 2):
        assert len(list(blocks(shape, start, end))) <= 3
