"""The Triton forms of the small ops on a GPU in bf16, against their fp64 references."""

import pytest
import torch

from tests.helpers.numerics import assert_close_calibrated
from tests.kernels.fused import cases, results

pytestmark = pytest.mark.gpu
CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_calibrated_and_repeats_to_the_bit(name):
    case = CASES[name]
    found = results(case.op, case.inputs, torch.bfloat16, "cuda")
    again = results(case.op, case.inputs, torch.bfloat16, "cuda")
    exact = results(case.reference, case.inputs, torch.float64, "cpu")
    rounded = results(case.reference, case.inputs, torch.bfloat16, "cpu")
    for part in exact:
        assert torch.equal(found[part], again[part]), part
        actual = found[part].cpu()
        assert_close_calibrated(actual, exact[part], rounded[part].to(actual.dtype), part)


def poison() -> None:
    """Fills memory that the next allocations get with NaN."""
    for size in (2**12, 2**16, 2**20, 2**24):
        for _ in [torch.full((size,), float("nan"), device="cuda") for _ in range(8)]:
            pass


@pytest.mark.parametrize("name", CASES)
def test_what_was_in_memory_does_not_matter(name):
    case = CASES[name]
    found = results(case.op, case.inputs, torch.bfloat16, "cuda")
    poison()
    again = results(case.op, case.inputs, torch.bfloat16, "cuda")
    assert all(torch.equal(found[part], again[part]) for part in found)
