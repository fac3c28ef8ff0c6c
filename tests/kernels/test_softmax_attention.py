"""Packed attention against its definition in fp64, and what rotary embedding promises."""

import pytest
import torch

from mixtron.kernels.softmax_attention import (
    apply_rope,
    softmax_attention,
    softmax_attention_reference,
)
from tests.helpers.numerics import assert_close_calibrated

K = 8
SCALE = K**-0.5
PACKED = [1, 7, 64, 1, 57]


def make_inputs(T: int, heads: int = 4, kv_heads: int = 2, dtype=torch.float64) -> list:
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, heads, K), (T, kv_heads, K), (T, kv_heads, K)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


def padded_offsets(lengths: list[int]) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(3)]).to(torch.int32)


def attention(inputs, lengths, **options):
    return softmax_attention(*inputs, lengths, padded_offsets(lengths), scale=SCALE, **options)


def reference(inputs, lengths, **options):
    return softmax_attention_reference(*inputs, lengths, scale=SCALE, **options)


def results(function, inputs, lengths, **options) -> dict:
    """The output and the gradient of every input."""
    o_THK = function(inputs, lengths, **options)
    generator = torch.Generator().manual_seed(99)
    weights = torch.randn(o_THK.shape, generator=generator, dtype=torch.float64).to(o_THK.dtype)
    gradients = torch.autograd.grad((o_THK * weights).sum(), inputs)
    return {"o": o_THK.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def in_dtype(inputs, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in inputs]


def assert_equals_reference(inputs, lengths, **options):
    """fp64: the same sums in another order."""
    found = results(attention, inputs, lengths, **options)
    expected = results(reference, inputs, lengths, **options)
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("T", [1, 63, 65, 130])
def test_equals_reference(T, kv_heads, window):
    assert_equals_reference(make_inputs(T, kv_heads=kv_heads), [T], window=window)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lengths", [PACKED, [1, 1, 1], [65, 65]], ids=str)
def test_packed_equals_reference(lengths, kv_heads, window):
    assert_equals_reference(make_inputs(sum(lengths), kv_heads=kv_heads), lengths, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 7])
def test_low_precision_is_calibrated(dtype, window):
    inputs = make_inputs(sum(PACKED), dtype=dtype)
    exact = results(reference, in_dtype(inputs, torch.float64), PACKED, window=window)
    low = results(reference, inputs, PACKED, window=window)
    for name, x in results(attention, inputs, PACKED, window=window).items():
        assert_close_calibrated(x, exact[name], low[name], name)


def test_reference_against_a_sum_over_tokens():
    """The reference itself, written out for one head, token by token."""
    q_THK, k_TGK, v_TGK = (x.detach() for x in make_inputs(9, heads=2, kv_heads=1))
    lengths, window = [4, 5], 3
    found = softmax_attention_reference(q_THK, k_TGK, v_TGK, lengths, scale=SCALE, window=window)
    first = 0
    for length in lengths:
        for t in range(first, first + length):
            seen = range(max(first, t - window + 1), t + 1)
            weights = [torch.exp(SCALE * q_THK[t, 1] @ k_TGK[s, 0]) for s in seen]
            o_K = sum(w * v_TGK[s, 0] for w, s in zip(weights, seen, strict=True)) / sum(weights)
            torch.testing.assert_close(found[t, 1], o_K, rtol=1e-12, atol=1e-14)
        first += length


@pytest.mark.parametrize("changed", range(len(PACKED)))
def test_no_document_leaks_into_another(changed):
    """Changing one document leaves the others' outputs and gradients equal to the bit."""
    inputs = make_inputs(sum(PACKED))
    mixed = []
    for x in inputs:
        parts = list(x.detach().split(PACKED))
        parts[changed] = parts[changed] + 1
        mixed.append(torch.cat(parts).requires_grad_())
    before, after = (results(attention, x, PACKED) for x in (inputs, mixed))
    for name in before:
        pairs = zip(before[name].split(PACKED), after[name].split(PACKED), strict=True)
        for document, (x, y) in enumerate(pairs):
            assert torch.equal(x, y) or document == changed, (name, document)
    assert not torch.equal(before["o"], after["o"])


def test_the_future_does_not_leak():
    inputs = [x.detach() for x in make_inputs(65)]
    later = [torch.cat([x[:40], x[40:] + 1]) for x in inputs]
    before, after = attention(inputs, [65]), attention(later, [65])
    assert torch.equal(before[:40], after[:40])
    assert not torch.equal(before[40:], after[40:])


@pytest.mark.parametrize(
    ("lengths", "kv_heads"), [([64], 2), ([60, 6], 2), ([65], 3)], ids=["short", "long", "heads"]
)
def test_shapes_that_do_not_fit(lengths, kv_heads):
    with pytest.raises(ValueError, match="do not fit"):
        attention(make_inputs(65, kv_heads=kv_heads), lengths)


BASE = 10_000.0


def rotated(x_THK, position_T):
    frequency_R = BASE ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    angle_TR = position_T[:, None].double() * frequency_R
    return apply_rope(x_THK, angle_TR.cos(), angle_TR.sin())


def test_rope_at_position_0_is_the_identity():
    q_THK, *_ = make_inputs(5)
    assert torch.equal(rotated(q_THK, torch.zeros(5)), q_THK)


def test_rope_keeps_norms():
    q_THK, *_ = make_inputs(65)
    turned = rotated(q_THK, torch.arange(65))
    torch.testing.assert_close(turned.norm(dim=-1), q_THK.norm(dim=-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shift", [1, 77, 4096])
def test_rope_scores_depend_on_distances_alone(shift):
    q_THK, k_TGK, _ = make_inputs(65, kv_heads=4)
    position_T = torch.arange(65)

    def scores(offset):
        turned = (rotated(x, position_T + offset) for x in (q_THK, k_TGK))
        return torch.einsum("thk,shk->hts", *turned)

    torch.testing.assert_close(scores(shift), scores(0), rtol=1e-9, atol=1e-9)
    still = torch.einsum("thk,shk->hts", q_THK, k_TGK)
    assert not torch.allclose(scores(0), still, atol=0.1)


def test_rope_turns_each_pair_by_its_own_angle():
    """x[r] + i x[r + K/2] is multiplied by exp(i angle_r)."""
    q_THK = make_inputs(65)[0].detach()
    position_T = torch.arange(65)
    first, second = q_THK.chunk(2, dim=-1)
    frequency_R = BASE ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    turn_TR = torch.polar(torch.ones(65, K // 2).double(), position_T[:, None] * frequency_R)
    expected = torch.complex(first, second) * turn_TR[:, None]
    expected = torch.cat([expected.real, expected.imag], dim=-1)
    torch.testing.assert_close(rotated(q_THK, position_T), expected, rtol=1e-12, atol=1e-12)


def test_rope_keeps_the_dtype_and_rounds_once():
    q_THK = make_inputs(65, dtype=torch.bfloat16)[0].detach()
    found = rotated(q_THK, torch.arange(65))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rotated(q_THK.double(), torch.arange(65)).to(torch.bfloat16))
