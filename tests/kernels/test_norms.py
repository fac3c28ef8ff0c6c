"""The norms' torch form against their definitions; Triton's form is in test_fused_triton.py."""

import pytest
import torch

from mixtron.kernels.norms import rms_norm, rms_norm_reference, unit_norm, unit_norm_reference
from tests.helpers.numerics import assert_close_calibrated


def make_inputs(dtype=torch.float64, width: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5, width), (width,), (3, 5, width))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def gradients(y, inputs):
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad((y * noise.to(y.dtype)).sum(), inputs)]


FORMS = {
    "plain": (
        lambda x, w, z: rms_norm(x, w, 1e-5),
        lambda x, w, z: rms_norm_reference(x, w, 1e-5),
        2,
    ),
    "gated": (
        lambda x, w, z: rms_norm(x, w, 1e-5, gate=z),
        lambda x, w, z: rms_norm_reference(x, w, 1e-5, gate=z),
        3,
    ),
    "unit": (lambda x, w, z: unit_norm(x), lambda x, w, z: unit_norm_reference(x), 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_definition(form):
    op, reference, used = FORMS[form]
    inputs = make_inputs()
    found = gradients(op(*inputs), inputs[:used])
    for x, exact in zip(found, gradients(reference(*inputs), inputs[:used]), strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_bf16_is_calibrated(form):
    op, reference, used = FORMS[form]
    inputs = make_inputs(torch.bfloat16, width=256)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    found = gradients(op(*inputs), inputs[:used])
    exact = gradients(reference(*exact_inputs), exact_inputs[:used])
    low = gradients(reference(*inputs), inputs[:used])
    for x, precise, rounded in zip(found, exact, low, strict=True):
        assert_close_calibrated(x, precise, rounded)


def test_a_unit_in_fp32_is_not_rounded():
    x, *_ = make_inputs(torch.bfloat16)
    found, exact = unit_norm(x, dtype=torch.float32), unit_norm(x.float())
    assert torch.equal(found, exact)
    weight = torch.randn_like(exact)
    by_dtype, by_cast = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, exact))
    assert torch.equal(by_dtype, by_cast)


def test_a_row_of_zeros():
    x = torch.zeros(2, 4, requires_grad=True)
    y = unit_norm(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("weight", "gate"), [((5,), (3, 4)), ((4,), (4,))])
def test_shapes_that_do_not_fit(weight, gate):
    with pytest.raises(ValueError, match="do not fit"):
        rms_norm(torch.zeros(3, 4), torch.zeros(weight), 1e-5, gate=torch.zeros(gate))


def test_a_form_that_cannot_run_is_refused():
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="the triton form runs on a GPU"):
        rms_norm(x, torch.ones(4), 1e-5, backend="triton")
