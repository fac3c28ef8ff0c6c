"""The Triton form against the recurrence, run by Triton's interpreter: the kernels' arithmetic."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECK = """
import torch
from tests.kernels import test_delta_rule as common

common.K = common.V = 16
for T, J, step_size, decay, offsets, rows in [
    (1, 2, "kaczmarz", True, None, 1),
    (65, 4, "kaczmarz", True, None, 1),
    (130, 2, "longhorn", False, None, 1),
    (64, 2, "learned", True, None, 1),
    (200, 2, "kaczmarz", True, [0, 1, 2, 63, 64, 150, 200, 200], 1),
    (210, 2, "kaczmarz", True, [0, 1, 70, 100, 140, 209, 210, 210], 3),
]:
    options = {"step_size": step_size}
    if offsets is not None:
        options["cu_seqlens"] = torch.tensor(offsets)
    inputs = common.make_inputs(T, J=J, decay=decay, step_size=step_size)
    exact = common.results(inputs, **options, backend="reference")
    fp32 = common.to_dtype(inputs, torch.float32)
    found = common.results(fp32, **options, rows=rows, backend="triton")
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        error = float((found[name] - x).norm() / x.norm())
        # fp32 sums, and the triangular solve, of up to 200 terms.
        assert error < 2e-5, (T, step_size, name, error)
    print("checked", T, len(exact))
"""


def test_interpreted_kernels_equal_the_recurrence():
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHECK]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [
        "checked 1 8",
        "checked 65 8",
        "checked 130 7",
        "checked 64 8",
        "checked 200 8",
        "checked 210 8",
    ]
    assert done.stdout.splitlines() == expected
