"""The Triton forms of linear and log-linear attention against torch's, run by Triton's interpreter:
the kernels' arithmetic."""

from tests.helpers.interpreter import run_interpreted

CHECK = """
import dataclasses
import torch
from mixtron.kernels.gated_linear_attention import triton_op
from tests.kernels import test_gated_linear_attention as one_state
from tests.kernels import test_linear_attention as normalised
from tests.kernels import test_log_linear_attention as log_linear
from mixtron.kernels.log_linear_attention import triton_plan

# Three ranges of bits in a few chunks.
triton_plan.SPLIT_BITS = (0, 1, 2)

one_state.K = one_state.V = log_linear.K = log_linear.V = 16


def compare(common, inputs, label, **options):
    exact = common.results(inputs, **options)
    found = common.results(common.to_dtype(inputs, torch.float32), **options, backend="triton")
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        # fp32 sums of up to 300 terms.
        error = float((found[name] - x).norm()) / max(float(x.norm()), 1e-3)
        assert error < 5e-6, (label, name, error)
    print("checked", label, len(exact))


offsets = torch.tensor([0, 1, 2, 63, 64, 150, 200, 200])
for decay in one_state.DECAYS:
    inputs = one_state.make_inputs(200, J=4, decay=decay)
    compare(one_state, inputs, decay, cu_seqlens=offsets)
one_scan = dataclasses.replace(triton_op.PLAN, fewest_programs=1)
two_steps, triton_op.PLAN = triton_op.PLAN, one_scan
compare(one_state, one_state.make_inputs(200, J=4), "in one scan", cu_seqlens=offsets)
triton_op.PLAN = two_steps
rows = {"cu_seqlens": torch.tensor([0, 40, 65, 130]), "rows": 2}
for decay in one_state.DECAYS:
    compare(one_state, one_state.make_inputs(130, decay=decay), f"rows {decay}", **rows)
for lengths, position in [([1, 264], 0), ([30, 100], 100)]:
    for base in log_linear.BASES:
        inputs = log_linear.make_inputs(sum(lengths), base)
        options = {"lengths": lengths, "initial_position": position}
        compare(log_linear, inputs, (base, lengths, position), **options)

normalised.K = normalised.V = 16
inputs = normalised.make_inputs(130)
state = torch.randn(1, normalised.H, 16, 17, dtype=torch.float64).abs()


def run(inputs, dtype, backend):
    leaves = [x.detach().to(dtype).requires_grad_() for x in [*inputs, state]]
    options = {"initial_state_BHKW": leaves[3], "backend": backend, **rows}
    o, end = normalised.linear_attention(*leaves[:3], **options)
    return [o, end, *torch.autograd.grad((o.square().sum() + end.sum()).to(dtype), leaves)]


exact, found = run(inputs, torch.float64, "chunk"), run(inputs, torch.float32, "triton")
for x, y in zip(exact, found, strict=True):
    assert float((y - x).norm() / x.norm()) < 5e-6
print("checked normalised", len(exact))
"""


def test_interpreted_kernels_equal_the_chunked_form():
    assert run_interpreted(CHECK) == [
        "checked head 7",
        "checked channel 7",
        "checked in one scan 7",
        "checked rows head 7",
        "checked rows channel 7",
        *(
            f"checked {(base, lengths, position)} {results}"
            for lengths, position in [([1, 264], 0), ([30, 100], 100)]
            for base, results in [("gated_linear", 7), ("gated_delta", 8)]
        ),
        "checked normalised 6",
    ]
