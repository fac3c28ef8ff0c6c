"""The Triton form against the recurrence, run by Triton's interpreter: the kernels' arithmetic."""

from tests.helpers.interpreter import run_interpreted

CHECK = """
import dataclasses
import torch
from mixtron.kernels import self_test, self_test_cases
from mixtron.kernels.delta_rule import (
    delta_rule_decode,
    delta_rule_segment_map,
    triton_launch,
    triton_plan,
)
from tests.kernels import test_delta_rule as common

# Two blocks of keys and of values in each program or grid.
half = triton_plan.Launch(warps=4, stages=1, block_v=16, block_k=16)
triton_plan.PLANS[90] = dataclasses.replace(
    triton_plan.PLANS[90], scan=half, reverse=half, states=half, gradient=half
)
common.K = common.V = 32
# Two segments of 200 tokens, each of two chunks of which the first's state is kept.
triton_launch.STATE_EVERY = triton_launch.SEGMENTS = 2


def close(what, found, exact):
    error = float((found - exact).norm() / exact.norm())
    # fp32 sums, and the triangular solve, of up to 200 terms.
    assert error < 2e-5, (what, error)


for T, J, step_size, decay, unit_queries, offsets, rows in [
    (1, 2, "kaczmarz", True, True, None, 1),
    (65, 4, "kaczmarz", True, True, None, 1),
    (200, 2, "longhorn", False, False, None, 1),
    (64, 2, "learned", True, False, None, 1),
    (210, 2, "kaczmarz", True, False, [0, 1, 70, 100, 140, 209, 210, 210], 3),
    # Four pieces, of which one begins a document.
    (256, 2, "kaczmarz", True, True, [0, 1, 2, 63, 64, 66, 128, 256, 256], 1),
]:
    options = {"step_size": step_size, "unit_queries": unit_queries}
    if offsets is not None:
        options["cu_seqlens"] = torch.tensor(offsets)
    inputs = common.make_inputs(T, J=J, decay=decay, step_size=step_size)
    if unit_queries:
        lengths = torch.linspace(0.1, 9, T, dtype=torch.float64)
        inputs[0] = (inputs[0] * lengths[:, None, None]).detach().requires_grad_()
    exact = common.results(inputs, **options, backend="reference")
    fp32 = common.to_dtype(inputs, torch.float32)
    found = common.results(fp32, **options, rows=rows, backend="triton")
    assert found.keys() == exact.keys()
    for name, x in exact.items():
        close((T, step_size, name), found[name], x)
    print("checked", T, len(exact))


def segment_map(inputs, **options):
    return delta_rule_segment_map(*inputs[1:5], **options)


def with_gradients(inputs, **options):
    # common.results without what the map does not depend on.
    leaves = [x for x in inputs[1:5]]
    maps = segment_map(inputs, **options)
    generator = torch.Generator().manual_seed(9)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)).sum()
        for x in maps
    )
    return [*maps, *torch.autograd.grad(loss, leaves)]


common.V = 16
# Not cut, with a ragged tail; and four pieces that continue a document, begin one, continue one.
for T, offsets in [(70, None), (256, torch.tensor([0, 66, 128, 200, 256, 256]))]:
    inputs = common.make_inputs(T, J=2)
    options = {"step_size": "kaczmarz", "cu_seqlens": offsets}
    exact = with_gradients(inputs, **options)
    found = with_gradients(common.to_dtype(inputs, torch.float32), **options, backend="triton")
    for i, (x, y) in enumerate(zip(found, exact, strict=True)):
        if y.any():
            close(("map", i), x, y)
        else:
            assert not x.any(), i
    print("checked map", len(exact))

for step_size in ("kaczmarz", "learned", "longhorn"):
    q, k = torch.randn(2, 3, 2, 16)
    v, logits, (rate, bias) = torch.randn(3, 4, 32), torch.randn(2, 3, 4), torch.randn(2, 4)
    bias -= 4  # small steps in time, whose logarithm must be exact
    found_state = torch.randn(3, 4, 16, 32)
    exact_state = found_state.double()
    options = {"step_size": step_size, "normalize_keys": step_size == "learned"}
    for _ in range(2):
        token = (q, k, v, logits[0], rate, bias, logits[1])
        found = delta_rule_decode(found_state, *token, **options, backend="triton")
        wide = [x.double() for x in token]
        exact = delta_rule_decode(exact_state, *wide, **options, backend="torch")
        close(("decode", step_size), found, exact)
        close(("decoded state", step_size), found_state, exact_state)
    print("checked decode")

self_test.check(self_test_cases.norm_case(), torch.device("cpu"))
print("checked self-test")
"""


def test_interpreted_kernels_equal_the_recurrence():
    expected = [
        "checked 1 8",
        "checked 65 8",
        "checked 200 7",
        "checked 64 8",
        "checked 210 8",
        "checked 256 8",
        *["checked map 6"] * 2,
        *["checked decode"] * 3,
        "checked self-test",
    ]
    assert run_interpreted(CHECK) == expected
