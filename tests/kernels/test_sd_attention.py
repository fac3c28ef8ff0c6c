"""S-D attention against its definition in fp64, and what L = S - D promises."""

import pytest
import torch

from mixtron.kernels.sd_attention import (
    blockwise,
    flash,
    interaction,
    op,
    sd_attention,
    sd_attention_reference,
    sd_attention_step,
)
from tests.helpers.numerics import assert_close_calibrated

H, K = 3, 8
SCALE = K**-0.5
PACKED = [1, 7, 140, 1, 2, 57]
NAMES = ("q", "k", "v", "d")


def make_inputs(T: int, dtype=torch.float64, V: int = K, seed: int = 0) -> list:
    """q, k, v in dtype, and d >= 0 in at least fp32; leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate = torch.promote_types(dtype, torch.float32)
    tokens = [draw(T, H, K).to(dtype), draw(T, H, K).to(dtype), draw(T, H, V).to(dtype)]
    return [x.requires_grad_() for x in (*tokens, (2 * draw(T, H)).exp().to(gate))]


def padded_offsets(lengths: list[int]) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(3)]).to(torch.int32)


def attention(inputs, lengths):
    return sd_attention(*inputs, lengths, padded_offsets(lengths), scale=SCALE)


def reference(inputs, lengths):
    return sd_attention_reference(*inputs, lengths, scale=SCALE)


def results(function, inputs, lengths) -> dict:
    """The output and the gradient of every input."""
    o_THV = function(inputs, lengths)
    generator = torch.Generator().manual_seed(99)
    noise = torch.randn(o_THV.shape, generator=generator, dtype=torch.float64).to(o_THV.dtype)
    gradients = torch.autograd.grad((o_THV * noise).sum(), inputs)
    named = zip((f"d{name}" for name in NAMES), gradients, strict=True)
    return {"o": o_THV.detach(), **dict(named)}


def to_dtype(inputs, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in inputs]


def assert_equals_reference(inputs, lengths):
    """fp64: the same sums in another order."""
    found = results(attention, inputs, lengths)
    for name, x in results(reference, inputs, lengths).items():
        tolerance = 1e-12 * float(x.abs().max())
        torch.testing.assert_close(
            found[name], x, rtol=1e-9, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("V", [K, 5, 2 * K])
@pytest.mark.parametrize("T", [1, 2, 127, 128, 129, 130, 300])
def test_equals_reference(T, V):
    assert_equals_reference(make_inputs(T, V=V), [T])


@pytest.mark.parametrize("lengths", [PACKED, [1, 1, 1], [128, 128], [129, 129]], ids=str)
def test_packed_equals_reference(lengths):
    assert_equals_reference(make_inputs(sum(lengths)), lengths)


@pytest.mark.parametrize("block", [1, 16])
def test_blocks_do_not_change_the_result(block, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", block)
    assert_equals_reference(make_inputs(70), [3, 67])


def causal_forward(q_THE, k_THE, v_THE, cu_seqlens, longest, scale):
    """What the GPU's kernel gives: causal attention that includes the token, and z [H, T]."""
    assert q_THE.shape == k_THE.shape == v_THE.shape
    assert q_THE.shape[-1] % 8 == 0
    logits_HTT = causal_logits(q_THE, k_THE, cu_seqlens, scale)
    return torch.einsum("hts,she->the", logits_HTT.softmax(-1), v_THE), logits_HTT.logsumexp(-1)


def causal_backward(do_THE, q_THE, k_THE, v_THE, o_THE, z_HT, cu_seqlens, longest, scale):
    """What its backward does with the output and log-sum-exp that it is handed."""
    weights = (causal_logits(q_THE, k_THE, cu_seqlens, scale) - z_HT[..., None]).exp()
    delta_HT1 = (do_THE * o_THE).sum(-1).t()[..., None]
    dlogits = scale * weights * (torch.einsum("the,she->hts", do_THE, v_THE) - delta_HT1)
    return (
        torch.einsum("hts,she->the", dlogits, k_THE),
        torch.einsum("hts,the->she", dlogits, q_THE),
        torch.einsum("hts,the->she", weights, do_THE),
    )


def causal_logits(q_THE, k_THE, cu_seqlens, scale):
    document = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    order = torch.arange(len(document))
    allowed = (document[:, None] == document) & (order[:, None] >= order)
    logits_HTT = scale * torch.einsum("the,she->hts", q_THE, k_THE)
    return logits_HTT.masked_fill(~allowed, float("-inf"))


@pytest.mark.parametrize("V", [K, 5])
@pytest.mark.parametrize("lengths", [[1], [9], PACKED], ids=str)
def test_the_way_around_the_gpu_kernel_is_exact(lengths, V, monkeypatch):
    """The kernel itself, which runs on GPUs alone, is stood in for by its definition."""
    monkeypatch.setattr(flash, "_causal_forward", causal_forward)
    monkeypatch.setattr(flash, "_causal_backward", causal_backward)
    monkeypatch.setattr(op, "_on_flash", lambda x: True)
    assert_equals_reference(make_inputs(sum(lengths), V=V), lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_calibrated(dtype):
    inputs = make_inputs(sum(PACKED), dtype=dtype)
    exact = results(reference, to_dtype(inputs, torch.float64), PACKED)
    low = results(lambda x, n: low_reference(x, n, dtype), inputs, PACKED)
    for name, x in results(attention, inputs, PACKED).items():
        assert_close_calibrated(x, exact[name], low[name], name)


def low_reference(inputs, lengths, dtype):
    """The reference with d in the inputs' dtype, so that it stays in it throughout."""
    *tokens, d_TH = inputs
    return sd_attention_reference(*tokens, d_TH.to(dtype), lengths, scale=SCALE)


@pytest.mark.parametrize("d", [0.0, 17.0, 90.0, 1e4])
def test_extreme_damping_stays_exact(d):
    """Also for first tokens, which attend nothing but themselves whatever d is."""
    inputs = make_inputs(40, dtype=torch.float32)
    inputs[3] = torch.full((40, H), d).requires_grad_()
    exact = results(reference, to_dtype(inputs, torch.float64), [1, 39])
    low = results(reference, inputs, [1, 39])
    found = results(attention, inputs, [1, 39])
    for name, x in found.items():
        assert_close_calibrated(x, exact[name], low[name], name)
    assert torch.equal(found["o"][:2], inputs[2][:2])


def test_reference_against_a_sum_over_tokens():
    """The reference itself, written out for one head, token by token."""
    q, k, v, d = (x.detach() for x in make_inputs(9))
    lengths, first = [4, 5], 0
    found = sd_attention_reference(q, k, v, d, lengths, scale=SCALE)
    for length in lengths:
        for i in range(first, first + length):
            seen = range(first, i + 1)
            logits = [SCALE * (q[i, 1] @ k[j, 1] - k[i, 1] @ q[j, 1]) for j in seen]
            logits[-1] = -d[i, 1]
            weights = torch.stack(logits).exp()
            o_V = sum(w * v[j, 1] for w, j in zip(weights, seen, strict=True)) / weights.sum()
            torch.testing.assert_close(found[i, 1], o_V, rtol=1e-12, atol=1e-14)
        first += length


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_routing_is_skew_to_the_last_bit(dtype):
    q, k, _, d = (x.detach() for x in make_inputs(65))
    S_HTT = interaction(q.to(dtype), k.to(dtype), torch.zeros_like(d), scale=SCALE)
    assert torch.equal(S_HTT, -S_HTT.mT)
    assert S_HTT.abs().max() > 1
    L_HTT = interaction(q, k, d, scale=SCALE)
    assert torch.equal(L_HTT.diagonal(dim1=1, dim2=2), -d.t())


@pytest.mark.parametrize("seed", range(8))
def test_no_eigenvalue_of_the_interaction_grows(seed):
    """Re(eig(S - D)) <= 0 for the unmasked L, whatever q, k and d >= 0 are."""
    generator = torch.Generator().manual_seed(seed)
    T = int(torch.randint(2, 60, (1,), generator=generator))
    q, k, _, d = (x.detach() for x in make_inputs(T, seed=seed))
    d = d * (torch.rand(d.shape, generator=generator) < 0.7)  # some are exactly 0
    size = 10.0 ** float(torch.randint(-3, 3, (1,), generator=generator))
    L_HTT = interaction(size * q, k, d, scale=SCALE)
    norms = torch.linalg.matrix_norm(L_HTT, 2)
    real_HT = torch.linalg.eigvals(L_HTT).real
    assert (real_HT.amax(-1) <= 1e-13 * T * norms).all()
    # Plain attention's scores have no such bound.
    scores_HTT = torch.einsum("thk,shk->hts", size * q, k)
    assert (torch.linalg.eigvals(scores_HTT).real.amax(-1) > 0).any()


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


def test_backward_keeps_no_scores():
    inputs = make_inputs(1000, dtype=torch.float32)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attention(inputs, [1000])
    # q, k, v, the output; d and the log-sum-exp.
    assert sum(kept.values()) <= 1000 * H * (4 * K + 2) * 4 + 64


def test_step_equals_the_whole():
    """Tokens one by one against caches, of two sequences of different lengths."""
    lengths = [9, 5]
    inputs = [x.detach() for x in make_inputs(sum(lengths))]
    expected = reference(inputs, lengths)
    q, k, v, d = (x.split(lengths) for x in inputs)
    for age_newest in range(1, 4):
        newest = [length - age_newest for length in lengths]
        slots = torch.arange(max(lengths))
        age_BS = torch.tensor(newest)[:, None] - slots
        cache = torch.zeros(2, max(lengths), H, 2 * K, dtype=torch.float64)
        values = torch.zeros(2, max(lengths), H, K, dtype=torch.float64)
        for b, length in enumerate(lengths):
            cache[b, :length] = torch.cat([k[b], q[b]], dim=-1)
            values[b, :length] = v[b]
        last = [torch.stack([x[b][newest[b]] for b in range(2)]) for x in (q, k, d)]
        found = sd_attention_step(*last, cache, values, age_BS, scale=SCALE)
        first = 0
        for b, length in enumerate(lengths):
            torch.testing.assert_close(
                found[b], expected[first + newest[b]], rtol=1e-12, atol=1e-14
            )
            first += length


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(5, 2, K)}, r"q \[5, 2, 8\]"),
        ({"d": torch.zeros(5, 1)}, r"d \[5, 1\]"),
        ({"d": torch.zeros(5, H, dtype=torch.bfloat16)}, "d_TH is torch.bfloat16"),
        ({"lengths": [2, 2]}, "documents of 4 tokens do not fit q of 5"),
        ({"lengths": None}, "lengths is None: backend='blockwise' reads them"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = dict(zip(NAMES, make_inputs(5, dtype=torch.float32), strict=True))
    arguments |= {"lengths": [5]} | change
    with pytest.raises(ValueError, match=message):
        sd_attention(*arguments.values(), padded_offsets([5]), scale=SCALE)
