"""The packed causal convolution against its definition."""

import pytest
import torch
import torch.nn.functional as F

from mixtron.kernels.short_convolution import short_convolution, short_convolution_reference
from tests.helpers.numerics import assert_close_calibrated

E = 5
PACKED = [1, 2, 30, 1, 65]


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def make_inputs(T: int, width: int, dtype=torch.float64, B: int = 1) -> list:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((T, B, E), (E, width))
    ]


def results(function, inputs, lengths) -> dict:
    """The output and the gradients of x and the weight."""
    y_TBE = function(*inputs, positions(lengths))
    generator = torch.Generator().manual_seed(99)
    weights = torch.randn(y_TBE.shape, generator=generator, dtype=torch.float64).to(y_TBE.dtype)
    dx, dweight = torch.autograd.grad((y_TBE * weights).sum(), inputs)
    return {"y": y_TBE.detach(), "dx": dx, "dweight": dweight}


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize(
    "lengths",
    [[1], [63], [65], [130], PACKED, [1, 1, 1, 1], [3, 3, 3]],
    ids=str,
)
def test_equals_reference(lengths, width):
    """fp64: the same products in another order. Documents shorter than the width are among them."""
    inputs = make_inputs(sum(lengths), width, B=2)
    found = results(short_convolution, inputs, lengths)
    for name, x in results(short_convolution_reference, inputs, lengths).items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("width", [1, 4])
def test_one_document_is_torchs_own_convolution(width):
    """An independent check of the reference: tap i weighs the token i steps back."""
    x_TBE, weight_EW = make_inputs(65, width)
    padded = F.pad(x_TBE.permute(1, 2, 0), (width - 1, 0))
    expected = F.conv1d(padded, weight_EW.flip(1)[:, None], groups=E).permute(2, 0, 1)
    for function in (short_convolution, short_convolution_reference):
        found = function(x_TBE, weight_EW, positions([65]))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("lengths", [[9], [1, 2, 6], [2, 7]], ids=str)
def test_gradients_by_finite_differences(lengths):
    position_T = positions(lengths)
    inputs = make_inputs(sum(lengths), 4)
    assert torch.autograd.gradcheck(lambda x, w: short_convolution(x, w, position_T), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_calibrated(dtype):
    inputs = make_inputs(sum(PACKED), 4, dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = results(short_convolution_reference, exact_inputs, PACKED)
    low = results(short_convolution_reference, inputs, PACKED)
    for name, x in results(short_convolution, inputs, PACKED).items():
        assert_close_calibrated(x, exact[name], low[name], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_each_document_alone_to_the_bit(dtype):
    x_TBE, weight_EW = make_inputs(sum(PACKED), 4, dtype)
    packed = short_convolution(x_TBE, weight_EW, positions(PACKED))
    alone = [
        short_convolution(part, weight_EW, positions([len(part)])) for part in x_TBE.split(PACKED)
    ]
    assert torch.equal(packed, torch.cat(alone))


def test_backward_keeps_only_the_inputs():
    inputs = make_inputs(65, 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        short_convolution(*inputs, positions([65]))
    position_bytes = 65 * 8
    assert sum(x.nbytes for x in kept) == sum(x.nbytes for x in inputs) + position_bytes


@pytest.mark.parametrize(
    ("x_shape", "weight_shape", "tokens", "message"),
    [
        ((9, 1, E), (E + 1, 4), 9, "weight"),
        ((9, E), (E, 4), 9, "weight"),
        ((9, 1, E), (E, 4), 8, "position"),
    ],
)
def test_shapes_that_do_not_fit(x_shape, weight_shape, tokens, message):
    with pytest.raises(ValueError, match=message):
        short_convolution(torch.zeros(x_shape), torch.zeros(weight_shape), torch.arange(tokens))
