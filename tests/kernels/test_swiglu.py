"""SwiGLU's form on a CPU against its definition; Triton's is in test_fused_triton.py."""

import pytest
import torch

from mixtron.kernels.swiglu import swiglu, swiglu_reference


def test_output_and_gradient_equal_the_definition():
    generator = torch.Generator().manual_seed(0)
    joined, weights = (
        torch.randn(5, 2, n, generator=generator, dtype=torch.float64) for n in (14, 7)
    )
    joined.requires_grad_()
    found, expected = swiglu(joined), swiglu_reference(joined)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((y * weights).sum(), [joined])[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_what_has_no_halves_is_refused():
    with pytest.raises(ValueError, match=r"joined \[2, 3\]: the last dimension has no two halves"):
        swiglu(torch.zeros(2, 3))


def test_triton_needs_a_gpu():
    with pytest.raises(ValueError, match="the triton form runs on a GPU"):
        swiglu(torch.zeros(2, 4), backend="triton")
