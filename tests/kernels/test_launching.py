"""Launches past Triton's own dispatch: the same arguments, and a kind of their own where Triton
would compile anew. That results are the same is told by the GPU tests of the ops."""

import types

import pytest
import torch

from mixtron.kernels import launching
from mixtron.kernels.launching import Launched
from mixtron.kernels.path_attention.triton_plan import layout_of
from mixtron.kernels.recurrence import document_numbers

CUDA = types.SimpleNamespace(current_device=lambda: 0)


class Kernel:
    """As a jit function: `kernel[grid](...)` launches and gives what it compiled."""

    arg_names = ["x", "gate", "rows", "eps", "WIDTH", "GATED"]

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self._compile()

    def _compile(self):
        runs = []
        made = types.SimpleNamespace(
            run=lambda *given: runs.append(given), function="f", packed_metadata="m", runs=runs
        )
        self.compiled.append(made)
        return made


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(launching.torch, "cuda", CUDA)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return Launched(Kernel())


def test_a_second_launch_of_a_kind_runs_what_was_compiled(launched):
    x = torch.zeros(8)
    for grid in ((3,), (5, 2)):
        launched(grid, x, None, 48, 0.5, GATED=False, WIDTH=8, num_warps=4)
    [compiled] = launched.kernel.compiled
    [given] = compiled.runs
    assert given == (5, 2, 1, 7, "f", "m", None, None, None, x, None, 48, 0.5, 8, False)


@pytest.mark.parametrize(
    ("x", "gate", "rows", "options"),
    [
        (torch.zeros(8).bfloat16(), None, 48, {}),
        (torch.zeros(9)[1:], None, 48, {}),
        (torch.zeros(8), torch.zeros(8), 48, {}),
        (torch.zeros(8), None, 49, {}),
        (torch.zeros(8), None, 1, {}),
        (torch.zeros(8), None, 2**32, {}),
        (torch.zeros(8), None, 48, {"WIDTH": 16}),
        (torch.zeros(8), None, 48, {"num_warps": 8}),
    ],
    ids=["dtype", "alignment", "None", "multiple of 16", "one", "64 bits", "constant", "warps"],
)
def test_another_kind_is_compiled(launched, x, gate, rows, options):
    plain = {"WIDTH": 8, "GATED": False, "num_warps": 4}
    launched((3,), torch.zeros(8), None, 48, 0.5, **plain)
    launched((3,), x, gate, rows, 0.5, **plain | options)
    assert len(launched.kernel.compiled) == 2
    launched((3,), torch.zeros(8), None, 64, 0.25, **plain)
    assert len(launched.kernel.compiled) == 2


def test_documents_are_numbered_once_for_offsets_that_stay_as_they_are():
    offsets = torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    numbers = document_numbers(offsets, 5)
    assert numbers.tolist() == [0, 0, 1, 1, 1]
    assert document_numbers(offsets, 5) is numbers
    assert document_numbers(offsets.clone(), 5) is not numbers
    assert document_numbers(offsets, 6).tolist() == [0, 0, 1, 1, 1, 2]
    cut = [layout_of(5, 1, 4, offsets, None) for _ in range(2)]
    assert cut[0].start_S is cut[1].start_S
    offsets[1] = 3
    assert document_numbers(offsets, 5).tolist() == [0, 0, 0, 1, 1]
    found = layout_of(5, 1, 4, offsets, None)
    assert (cut[0].start_S.tolist(), cut[0].end_S.tolist()) == (
        [0, 0, 2, 2, 2, 5, 5, 5],
        [2, 2, 5, 5, 5, 8, 8, 8],
    )
    assert found.start_S.tolist() == [0, 0, 0, 3, 3, 5, 5, 5]
