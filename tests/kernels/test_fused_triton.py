"""The Triton forms of the small ops against their references, run by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.fused import cases

ROOT = Path(__file__).parents[2]
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
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHECK]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == list(cases())
