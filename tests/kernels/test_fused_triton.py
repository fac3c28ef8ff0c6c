"""The Triton forms of the small ops against their references, run by Triton's interpreter."""

from tests.helpers.interpreter import run_interpreted
from tests.kernels.fused import cases

CHECK = """
import torch
from tests.kernels.fused import cases, results

for name, case in cases().items():
    exact = results(case.reference, case.inputs, torch.float64, "cpu")
    found = results(case.op, case.inputs, torch.float32, "cpu")
    assert found.keys() == exact.keys()
    for part, x in exact.items():
        assert found[part].dtype == torch.float32
        error = float((found[part] - x).norm() / x.norm())
        # fp32 sums of up to 1000 terms.
        assert error < 2e-6, (name, part, error)
    print(name)
"""


def test_interpreted_kernels_equal_the_references():
    assert run_interpreted(CHECK) == list(cases())
