"""Linear attention in chunks and steps against attention with explicit weights, in fp64."""

import pytest
import torch

from mixtron.kernels.linear_attention import (
    linear_attention,
    linear_attention_reference,
    linear_attention_segment_map,
    linear_attention_step,
)
from mixtron.kernels.linear_attention.reference import features
from tests.helpers.numerics import assert_close_calibrated

H, K, V = 2, 8, 5
NAMES = ("q", "k", "v")
PACKED = [1, 7, 140, 1, 2, 57]


def make_inputs(T: int, B: int = 1, dtype=torch.float64) -> list:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


def offsets(lengths) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(3)]).to(torch.int32)


def results(function, inputs, cu_seqlens=None) -> dict:
    o_BTHV = function(*inputs, cu_seqlens=cu_seqlens)
    o_BTHV = o_BTHV[0] if isinstance(o_BTHV, tuple) else o_BTHV
    generator = torch.Generator().manual_seed(99)
    noise = torch.randn(o_BTHV.shape, generator=generator, dtype=torch.float64).to(o_BTHV.dtype)
    gradients = torch.autograd.grad((o_BTHV * noise).sum(), inputs)
    named = zip((f"d{name}" for name in NAMES), gradients, strict=True)
    return {"o": o_BTHV.detach(), **dict(named)}


def assert_equals_reference(inputs, cu_seqlens=None):
    found = results(linear_attention, inputs, cu_seqlens)
    for name, x in results(linear_attention_reference, inputs, cu_seqlens).items():
        # Of a document of one token, the gradients of q and k cancel to nothing.
        tolerance = max(1e-14, 1e-12 * float(x.abs().max()))
        torch.testing.assert_close(
            found[name], x, rtol=1e-9, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_the_reference(T):
    assert_equals_reference(make_inputs(T, B=2))


@pytest.mark.parametrize("lengths", [PACKED, [1, 1, 1], [64, 64]], ids=str)
def test_packed_equals_reference(lengths):
    assert_equals_reference(make_inputs(sum(lengths)), offsets(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_calibrated(dtype):
    inputs, cu_seqlens = make_inputs(sum(PACKED), dtype=dtype), offsets(PACKED)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = results(linear_attention_reference, wide, cu_seqlens)
    low = results(linear_attention_reference, inputs, cu_seqlens)
    for name, x in results(linear_attention, inputs, cu_seqlens).items():
        assert_close_calibrated(x, exact[name], low[name], name)


def test_reference_against_a_sum_over_tokens():
    q, k, v = (x.detach()[0, :, 1] for x in make_inputs(9))
    inputs = [x.detach() for x in make_inputs(9)]
    found = linear_attention_reference(*inputs, offsets([4, 5]))[0, :, 1]
    phi = torch.nn.functional.elu
    for first, end in ((0, 4), (4, 9)):
        for i in range(first, end):
            weights = [(phi(q[i]) + 1) @ (phi(k[j]) + 1) for j in range(first, i + 1)]
            o_V = sum(w * v[first + n] for n, w in enumerate(weights)) / sum(weights)
            torch.testing.assert_close(found[i], o_V, rtol=1e-12, atol=1e-14)


def test_features_are_elu_plus_one_and_keep_small_numbers():
    x = torch.linspace(-8, 8, 33, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(features(x), torch.nn.functional.elu(x) + 1, rtol=0, atol=1e-15)
    (slope,) = torch.autograd.grad(features(x).sum(), x)
    torch.testing.assert_close(slope, x.detach().clamp(max=0).exp(), rtol=1e-15, atol=0)
    small = features(torch.tensor(-20.0))
    torch.testing.assert_close(small, torch.tensor(-20.0).exp(), rtol=1e-6, atol=0)


def test_outputs_are_averages_of_values():
    q, k, v = make_inputs(100)
    o_BTHV, _ = linear_attention(q, k, torch.ones_like(v))
    torch.testing.assert_close(o_BTHV, torch.ones_like(o_BTHV), rtol=1e-12, atol=0)


def test_underflow_gives_no_nan():
    inputs = [(x - 200).detach().requires_grad_() for x in make_inputs(5, dtype=torch.float32)]
    for name, x in results(linear_attention, inputs).items():
        assert x.isfinite().all(), name


def test_a_split_sequence_continues_from_the_state():
    inputs = [x.detach() for x in make_inputs(130)]
    whole, last = linear_attention(*inputs)
    first, second = zip(*(x.split([57, 73], dim=1) for x in inputs), strict=True)
    o_first, state = linear_attention(*first)
    o_second, after = linear_attention(*second, initial_state_BHKW=state)
    torch.testing.assert_close(torch.cat([o_first, o_second], 1), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(after, last, rtol=1e-10, atol=1e-12)
    keep, write = linear_attention_segment_map(*second[1:])
    torch.testing.assert_close(keep * state + write, last, rtol=1e-10, atol=1e-12)
    keep, write = linear_attention_segment_map(*second[1:], cu_seqlens=offsets([3, 70]))
    assert not keep.any()


def test_steps_equal_the_whole():
    inputs = [x.detach() for x in make_inputs(20, B=2)]
    whole, last = linear_attention(*inputs)
    state = torch.zeros_like(last)
    for t in range(20):
        o_BHV, state = linear_attention_step(state, *(x[:, t] for x in inputs))
        torch.testing.assert_close(o_BHV, whole[:, t], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-12)
