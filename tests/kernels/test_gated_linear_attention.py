"""The chunked form against the recurrence, and the recurrence against its unrolled definition."""

import pytest
import torch

from mixtron.kernels.gated_linear_attention import (
    chunk,
    gated_linear_attention,
    gated_linear_attention_reference,
    gated_linear_segment_map,
    gated_linear_step,
)
from tests.helpers.numerics import assert_close_calibrated

H, K, V = 2, 8, 6
DECAYS = ("head", "channel")
NAMES = ("q", "k", "v", "log_decay", "initial_state")
either_decay = pytest.mark.parametrize("decay", DECAYS)


def make_inputs(T, *, B=1, J=H, decay="head", dtype=torch.float64, seed=0):
    """q, k, v in dtype; log decay and the initial state in at least fp32; all leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_dtype = torch.promote_types(dtype, torch.float32)
    inputs = [
        draw(B, T, H, K).to(dtype),
        draw(B, T, H, K).to(dtype),
        draw(B, T, J, V).to(dtype),
        (-0.3 * draw(*decay_shape(B, T, J, decay)).exp()).to(gate_dtype),
        draw(B, J, K, V).to(gate_dtype),
    ]
    return [x.requires_grad_() for x in inputs]


def decay_shape(B, T, J, decay):
    return (B, T, J) if decay == "head" else (B, T, H, K)


def to_dtype(inputs, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in inputs]


def run(inputs, **options):
    *tokens, initial_state = inputs
    return gated_linear_attention(*tokens, initial_state_BJKV=initial_state, **options)


def results(inputs, function=run, **options):
    """Output, final state, and the gradient of every input through both at once."""
    o_BTJV, state_BJKV = function(inputs, **options)
    generator = torch.Generator().manual_seed(99)
    loss = torch.zeros(())
    for x in (o_BTJV, state_BJKV):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        loss = loss + (x * noise.to(x.dtype)).sum()
    gradients = torch.autograd.grad(loss, inputs)
    found = {"o": o_BTJV, "state": state_BJKV}
    found |= {f"d{name}": g for name, g in zip(NAMES, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def assert_equal_fp64(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        tolerance = 1e-12 * float(x.abs().max())
        torch.testing.assert_close(
            found[name], x, rtol=1e-9, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_calibrated(inputs, **options):
    exact = results(to_dtype(inputs, torch.float64), backend="reference", **options)
    low = results(inputs, backend="reference", **options)
    for name, x in results(inputs, **options).items():
        assert_close_calibrated(x, exact[name], low[name], name)


@either_decay
@pytest.mark.parametrize("J", [H, 2 * H])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 200, 257])
def test_chunk_equals_reference(T, J, decay):
    inputs = make_inputs(T, B=2, J=J, decay=decay)
    assert_equal_fp64(results(inputs), results(inputs, backend="reference"))


@either_decay
@pytest.mark.parametrize(
    "cu_seqlens",
    [
        [0, 1, 2, 63, 64, 190, 191, 257],
        [0, 64, 128, 256, 257, 257, 257],
        [0, 0, 100, 100, 257],
        [0, 257, 257],
    ],
    ids=["ragged", "aligned-padded", "empty-documents", "one-padded"],
)
def test_packed_chunk_equals_reference(cu_seqlens, decay):
    inputs = make_inputs(257, J=2 * H, decay=decay)
    options = {"cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32)}
    assert_equal_fp64(results(inputs, **options), results(inputs, backend="reference", **options))


@either_decay
def test_packed_equals_each_document_alone(decay):
    lengths = [3, 1, 130, 64, 59]
    *tokens, initial_state = make_inputs(sum(lengths), J=2 * H, decay=decay)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    o_BTJV, state_BJKV = run([*tokens, initial_state], cu_seqlens=ends)
    alone = []
    for n, document in enumerate(zip(*(x.split(lengths, dim=1) for x in tokens), strict=True)):
        first = initial_state if n == 0 else None
        o, last_state = gated_linear_attention(*document, initial_state_BJKV=first)
        alone.append(o)
    torch.testing.assert_close(o_BTJV, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state_BJKV, last_state, rtol=1e-10, atol=1e-12)


@either_decay
def test_segments_do_not_change_the_result(decay, monkeypatch):
    inputs = make_inputs(257, B=2, decay=decay)
    whole = results(inputs)
    monkeypatch.setattr(chunk, "SEGMENT_CHUNKS", 8)  # two chunks a segment
    assert_equal_fp64(results(inputs), whole)


@either_decay
def test_backward_keeps_little_more_than_the_inputs(decay):
    *tokens, _ = make_inputs(1024, B=2, decay=decay, dtype=torch.bfloat16)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o_BTJV, _ = gated_linear_attention(*tokens)
    state_bytes = 2 * H * K * V * 4
    assert sum(kept.values()) <= sum(x.nbytes for x in tokens) + 2 * state_bytes
    o_BTJV.sum().backward()


@either_decay
@pytest.mark.parametrize("split", [1, 64, 100, 199])
def test_split_sequence_equals_whole(split, decay):
    """The final state of one part, given to the next, continues it, forwards and backwards."""

    def in_two_parts(inputs):
        *tokens, state = inputs
        outputs = []
        for part in zip(*(x.split([split, 200 - split], dim=1) for x in tokens), strict=True):
            o_BTJV, state = run([*part, state])
            outputs.append(o_BTJV)
        return torch.cat(outputs, dim=1), state

    inputs = make_inputs(200, J=2 * H, decay=decay)
    assert_equal_fp64(results(inputs, in_two_parts), results(inputs))


@either_decay
@pytest.mark.parametrize("cu_seqlens", [[0, 200], [0, 30, 130, 200]], ids=["whole", "packed"])
def test_segment_map_gives_the_final_state(cu_seqlens, decay):
    """decay * S + h, with the gradients of all that it is made of."""

    def untouched(inputs):
        """Zero, so that every input has a gradient also where the result does not depend on it."""
        return sum(0 * x.sum() for x in inputs)

    def by_map(inputs, cu_seqlens):
        _, k, v, log_decay, state = inputs
        decay_BJK1, h_BJKV = gated_linear_segment_map(k, v, log_decay, cu_seqlens=cu_seqlens)
        return untouched(inputs), decay_BJK1 * state + h_BJKV

    def by_reference(inputs, cu_seqlens):
        _, state_BJKV = run(inputs, cu_seqlens=cu_seqlens, backend="reference")
        return untouched(inputs), state_BJKV

    inputs, documents = make_inputs(200, J=2 * H, decay=decay), torch.tensor(cu_seqlens)
    expected = results(inputs, by_reference, cu_seqlens=documents)
    assert_equal_fp64(results(inputs, by_map, cu_seqlens=documents), expected)


@either_decay
def test_a_document_start_cuts_the_segment_map(decay):
    _, k, v, log_decay, _ = make_inputs(70, decay=decay)
    cut, _ = gated_linear_segment_map(k, v, log_decay, cu_seqlens=torch.tensor([0, 30, 70]))
    continued, _ = gated_linear_segment_map(k, v, log_decay, cu_seqlens=torch.tensor([0, 70]))
    assert cut.shape == (1, H, K, 1)
    assert not cut.any()
    assert continued.all()


@either_decay
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_no_document_leaks_into_another(changed, dtype, decay):
    """Changing one document leaves the others' outputs and gradients equal to the bit."""
    lengths = [70, 33, 97]
    cu_seqlens = torch.tensor([0, 70, 103, 200], dtype=torch.int32)
    inputs = make_inputs(200, J=2 * H, decay=decay, dtype=dtype)
    other = make_inputs(200, J=2 * H, decay=decay, dtype=dtype, seed=1)
    mixed = []
    for x, y in zip(inputs[:-1], other[:-1], strict=True):
        parts = list(x.detach().split(lengths, dim=1))
        parts[changed] = y.detach().split(lengths, dim=1)[changed]
        mixed.append(torch.cat(parts, dim=1).requires_grad_())
    before = results(inputs, cu_seqlens=cu_seqlens)
    after = results([*mixed, inputs[-1]], cu_seqlens=cu_seqlens)
    for name in ("o", *(f"d{n}" for n in NAMES[:-1])):
        pairs = zip(before[name].split(lengths, 1), after[name].split(lengths, 1), strict=True)
        for document, (x, y) in enumerate(pairs):
            assert torch.equal(x, y) == (document != changed), (name, document)


@either_decay
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_calibrated(dtype, decay):
    assert_calibrated(make_inputs(200, J=2 * H, decay=decay, dtype=dtype))


@either_decay
@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -50.0])
def test_decays_near_one_and_near_zero_are_accurate(log_decay, decay):
    inputs = make_inputs(200, decay=decay, dtype=torch.float32)
    inputs[3] = torch.full_like(inputs[3], log_decay).requires_grad_()
    assert_calibrated(inputs)


@either_decay
def test_weak_decays_beside_strong_ones_are_accurate(decay):
    """Prefix sums of log decays would lose the small ones after the large ones."""
    inputs = make_inputs(200, decay=decay, dtype=torch.float32)
    log_decay = torch.full_like(inputs[3], -0.01)
    log_decay[:, 3::16] = -500.0
    inputs[3] = log_decay.requires_grad_()
    assert_calibrated(inputs)


def test_channels_that_forget_beside_channels_that_keep_are_accurate():
    """No common reference point within a chunk serves both; each pair of tokens is exact."""
    inputs = make_inputs(200, decay="channel", dtype=torch.float32)
    log_decay = torch.full_like(inputs[3], -1e-3)
    log_decay[..., ::2] = -100.0
    inputs[3] = log_decay.requires_grad_()
    assert_calibrated(inputs)


@either_decay
@pytest.mark.parametrize("log_decay", [-50.0, -1e4, float("-inf")])
def test_strong_decay_is_finite(log_decay, decay):
    inputs = make_inputs(200, decay=decay, dtype=torch.float32)
    inputs[3] = torch.full_like(inputs[3], log_decay).requires_grad_()
    expected = results(inputs, backend="reference")
    for name, x in results(inputs).items():
        assert x.isfinite().all(), name
        torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-5)


def test_equal_channel_decays_are_one_decay_a_head():
    q, k, v, log_decay, state = make_inputs(200)
    channels = log_decay.unsqueeze(-1).expand(-1, -1, -1, K)
    for x, y in zip(run([q, k, v, log_decay, state]), run([q, k, v, channels, state]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@either_decay
def test_recurrence_equals_decayed_attention(decay):
    """o_t = scale sum_s (q_t . prod_{s<m<=t} alpha_m . k_s) v_s, for one head without a state."""
    q, k, v, log_decay, _ = (x.detach() for x in make_inputs(20, decay=decay))
    o_BTJV, _ = gated_linear_attention_reference(q, k, v, log_decay, scale=0.5)
    alpha_TK = log_decay[0, :, 1].exp().reshape(20, -1).expand(20, K)
    for t in range(20):
        expected = torch.zeros(V, dtype=torch.float64)
        for s in range(t + 1):
            kept_K = alpha_TK[s + 1 : t + 1].prod(0)
            expected += 0.5 * (q[0, t, 1] * kept_K * k[0, s, 1]).sum() * v[0, s, 1]
        torch.testing.assert_close(o_BTJV[0, t, 1], expected)


@either_decay
@pytest.mark.parametrize("prefill", [0, 64, 100])
def test_decode_continues_the_chunked_prefill(prefill, decay):
    *tokens, state = make_inputs(130, B=2, J=2 * H, decay=decay)
    o_BTJV, final = run([*tokens, state])
    if prefill:
        _, state = run([*(x[:, :prefill] for x in tokens), state])
    for t in range(prefill, 130):
        o_BJV, state = gated_linear_step(state, *(x[:, t] for x in tokens))
        torch.testing.assert_close(o_BJV, o_BTJV[:, t], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 5, 3, K)}, r"k_BTHK is \[1, 5, 3, 8\], expected q's \[1, 5, 2, 8\]"),
        ({"v": torch.zeros(1, 5, 3, V)}, r"v_BTJV is \[1, 5, 3, 6\].*multiple of 2"),
        ({"v": torch.zeros(1, 5, 2, V).half()}, r"v_BTJV is torch.float16 .*torch.float32"),
        ({"q": torch.zeros(1, 0, 2, K)}, r"q_BTHK is \[1, 0, 2, 8\]"),
        (
            {"log_decay": torch.zeros(1, 5, 2, 1)},
            r"log_decay is \[1, 5, 2, 1\], expected \[1, 5, 2\] or \[1, 5, 2, 8\]",
        ),
        ({"log_decay": torch.zeros(1, 5, 2).bfloat16()}, r"log_decay is torch.bfloat16"),
        ({"initial_state": torch.zeros(1, 2, V, K)}, r"initial_state_BJKV is \[1, 2, 6, 8\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens is \[0, 3\], expected .* 0 to 5"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, r"cu_seqlens is \[0, 4, 3, 5\]"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, r"cu_seqlens is torch.float32"),
        ({"backend": "loop"}, r"backend is 'loop', expected one of chunk, triton, reference"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = dict(zip(NAMES, make_inputs(5, dtype=torch.float32), strict=True)) | change
    state = arguments.pop("initial_state")
    positional = [arguments.pop(name) for name in NAMES[:-1]]
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(*positional, initial_state_BJKV=state, **arguments)


def test_packed_documents_need_one_row():
    *tokens, _ = make_inputs(5, B=2)
    with pytest.raises(
        ValueError, match=r"cu_seqlens needs a batch of 1, q_BTHK is \[2, 5, 2, 8\]"
    ):
        gated_linear_attention(*tokens, cu_seqlens=torch.tensor([0, 5]))
