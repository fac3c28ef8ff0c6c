"""Blockwise PaTH attention against its definition, and the definition against explicit products."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from mixtron.kernels.path_attention import (
    PastKeys,
    attend_past,
    documents,
    past_of,
    past_queries,
    path_attention,
    path_attention_step,
    path_attention_with_lse,
    path_segment,
)
from mixtron.kernels.path_attention.blocks import block_length
from mixtron.kernels.softmax_attention import softmax_attention_reference
from tests.helpers.numerics import assert_close_calibrated
from tests.launch.fake_gpu import Allocations

H, G, K, V = 4, 2, 16, 6
FORMS = {"path": "wb", "path-fox": "wbg", "fox": "g", "softmax": ""}
RAGGED = [0, 1, 2, 127, 128, 129, 310, 320, 500]


def make_inputs(T, form="path-fox", *, B=1, past=0, groups=G, dtype=torch.float64, seed=0):
    """Leaves by the op's argument names. beta reaches 0 and 2; w, beta, gates are at least fp32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    exact = torch.promote_types(dtype, torch.float32)
    inputs = {
        "q": draw(B, T, H, K).to(dtype),
        "k": draw(B, T, groups, K).to(dtype),
        "v": draw(B, T, groups, V).to(dtype),
        "w": F.normalize(draw(B, T, groups, K), dim=-1).to(exact),
        "beta": (2.4 * draw(B, T, groups).sigmoid() - 0.2).clamp(0, 2).to(exact),
        "log_forget": F.logsigmoid(draw(B, T, H) + 2).to(exact),
    }
    if past:
        inputs["past_k"] = draw(B, past, groups, K).to(exact)
        inputs["past_v"] = draw(B, past, groups, V).to(dtype)
        inputs["past_gate"] = -draw(B, past, H).abs().to(exact)
    left_out = {"w": "w", "beta": "b", "log_forget": "g", "past_gate": "g"}
    kept = FORMS[form]
    return {
        n: x.requires_grad_() for n, x in inputs.items() if n not in left_out or left_out[n] in kept
    }


def to_dtype(inputs, dtype):
    return {n: x.detach().to(dtype).requires_grad_() for n, x in inputs.items()}


def run(inputs, **options):
    x = dict(inputs)
    past = None
    if "past_k" in x:
        past = PastKeys(x["past_k"], x["past_v"], x.get("past_gate"))
    gates = (x.get(name) for name in ("w", "beta", "log_forget"))
    return path_attention(x["q"], x["k"], x["v"], *gates, past=past, **options)


def results(inputs, function=run, **options):
    """The output and the gradient of every input."""
    o_BTHV = function(inputs, **options)
    generator = torch.Generator().manual_seed(99)
    noise = torch.randn(o_BTHV.shape, generator=generator, dtype=torch.float64).to(o_BTHV.dtype)
    gradients = torch.autograd.grad(
        (o_BTHV * noise).sum(), list(inputs.values()), allow_unused=True, materialize_grads=True
    )
    found = {f"d{name}": g for name, g in zip(inputs, gradients, strict=True)}
    return {name: x.detach() for name, x in ({"o": o_BTHV} | found).items()}


def assert_equal_fp64(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        tolerance = 1e-12 * max(float(x.abs().max()), 1.0)
        torch.testing.assert_close(
            found[name], x, rtol=1e-9, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_calibrated(inputs, **options):
    exact = results(to_dtype(inputs, torch.float64), backend="reference", **options)
    low = results(inputs, backend="reference", **options)
    for name, x in results(inputs, **options).items():
        assert_close_calibrated(x, exact[name], low[name], name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("T", "B"), [(1, 2), (63, 2), (64, 2), (65, 2), (500, 1)])
def test_block_equals_reference(T, B, form):
    inputs = make_inputs(T, form, B=B)
    assert_equal_fp64(results(inputs), results(inputs, backend="reference"))


def test_block_equals_reference_at_a_thousand_tokens():
    inputs = make_inputs(1000, "path-fox")
    assert_equal_fp64(results(inputs), results(inputs, backend="reference"))


@pytest.mark.parametrize("groups", [1, 4])
def test_heads_share_keys(groups):
    inputs = make_inputs(140, groups=groups)
    assert_equal_fp64(results(inputs), results(inputs, backend="reference"))


@pytest.mark.parametrize("scales", [(None, K**-0.5), (0.3, 1.0)], ids=["before-scaling", "scale"])
def test_scales(scales):
    inputs = make_inputs(140)
    options = dict(zip(("scale", "gate_scale"), scales, strict=True))
    expected = results(inputs, backend="reference", **options)
    assert_equal_fp64(results(inputs, **options), expected)
    assert not torch.allclose(expected["o"], run(inputs), atol=1e-3)


@pytest.mark.parametrize("past", [0, 128, 150])
@pytest.mark.parametrize("form", ["path-fox", "fox"])
@pytest.mark.parametrize(
    "offsets",
    [RAGGED, [0, 128, 256, 500, 500, 500], [0, 0, 100, 100, 500], [0, 500, 500]],
    ids=["ragged", "aligned-padded", "empty-documents", "one-padded"],
)
def test_packed_block_equals_reference(offsets, form, past):
    inputs = make_inputs(500 - past, form, past=past)
    longest = max(b - a for a, b in pairwise(offsets))
    options = {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}
    expected = results(inputs, backend="reference", **options)
    assert_equal_fp64(results(inputs, max_seqlen=longest, **options), expected)


@pytest.mark.parametrize("form", ["path-fox", "fox"])
def test_keys_beyond_the_longest_document_are_not_visited(form, monkeypatch):
    """Documents of a block's length: a query visits its own block and the one before."""
    from mixtron.kernels.path_attention import attend

    visited = []
    logits = attend._logits

    def counted(*arguments):
        visited.append(arguments[-1])
        return logits(*arguments)

    monkeypatch.setattr(attend, "_logits", counted)
    inputs = make_inputs(1000, form)
    length = block_length(inputs["k"], inputs.get("w"))
    offsets = torch.tensor([*range(0, 1000, length), 1000])
    run(inputs, cu_seqlens=offsets, max_seqlen=length)
    assert [(seen.stop - seen.start) // length for seen in visited] == [0] + [1] * (999 // length)


@pytest.mark.parametrize("form", FORMS)
def test_past_continues_any_cut_of_a_sequence(form):
    """Segments, as context ranks have them: outputs and gradients are those of the whole."""
    cuts = [130, 1, 200, 69]

    def in_segments(inputs):
        parts = {n: x.split(cuts, dim=1) for n, x in inputs.items()}
        outputs, segments = [], []
        for i in range(len(cuts)):
            x = {n: p[i] for n, p in parts.items()}
            gates = [x.get(name) for name in ("w", "beta", "log_forget")]
            past = past_of(segments, list(parts["v"][:i])) if segments else None
            outputs.append(path_attention(x["q"], x["k"], x["v"], *gates, past=past))
            segments.append(path_segment(x["k"], *gates))
        return torch.cat(outputs, dim=1)

    inputs = make_inputs(sum(cuts), form)
    assert_equal_fp64(results(inputs, in_segments), results(inputs))


@pytest.mark.parametrize("form", ["path-fox", "path", "fox"])
def test_past_in_pieces_is_the_past_at_once(form):
    """Carried queries against two pieces of the past, merged with the segment's own attention."""
    x = make_inputs(200, form, past=150)
    cu_seqlens = torch.tensor([0, 30, 290, 350])
    expected = run(x, cu_seqlens=cu_seqlens)
    gates = [x.get(name) for name in ("w", "beta", "log_forget")]
    options = {"scale": K**-0.5, "cu_seqlens": torch.tensor([0, 140, 200])}
    o_BTHV, lse_BTH = path_attention_with_lse(
        x["q"], x["k"], x["v"], *gates, None, None, None, **options
    )
    q, until = past_queries(x["q"], x["k"], *gates, **options)
    document_S = documents(cu_seqlens, 350, 0, torch.device("cpu"))
    for piece in (slice(100, 150), slice(0, 100)):
        k, v = (x[name][:, piece].transpose(1, 2) for name in ("past_k", "past_v"))
        after = None
        if "past_gate" in x:
            after = x["past_gate"][:, piece].transpose(1, 2).unflatten(1, (G, -1))
        found, lse = attend_past(q, until, k, v, after, document_S[150:], document_S[:150][piece])
        found, lse = (y.flatten(1, 2).transpose(1, 2) for y in (found, lse))
        total = torch.logaddexp(lse_BTH, lse)
        o_BTHV = (lse_BTH - total).exp()[..., None] * o_BTHV + (lse - total).exp()[
            ..., None
        ] * found
        lse_BTH = total
    torch.testing.assert_close(o_BTHV, expected, rtol=1e-9, atol=1e-12)


def test_segment_keys_and_map_are_explicit_products():
    x = {n: y.detach() for n, y in make_inputs(150).items()}
    segment = path_segment(x["k"], x["w"], x["beta"], x["log_forget"])
    for g in range(G):
        product = torch.eye(K).double()
        for t in reversed(range(150)):
            torch.testing.assert_close(segment.k_BTGK[0, t, g], product @ x["k"][0, t, g])
            product = product @ householder(x["w"][0, t, g], x["beta"][0, t, g])
        torch.testing.assert_close(segment.map_BGKK[0, g], product)
    behind = x["log_forget"].flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(segment.gate_total_BH, behind[:, 0])
    torch.testing.assert_close(segment.gate_after_BTH[:, :-1], behind[:, 1:])


def householder(w_K, beta):
    return torch.eye(K).double() - beta * torch.outer(w_K, w_K)


def test_reference_is_the_papers_formula():
    """Every logit by its own product of matrices, from the definition."""
    x = {n: y.detach() for n, y in make_inputs(12).items()}
    found = path_attention(*x.values(), backend="reference")
    for h in range(H):
        g = h // (H // G)
        for i in range(12):
            logits = []
            for j in range(i + 1):
                product = torch.eye(K).double()
                for s in range(j + 1, i + 1):
                    product = product @ householder(x["w"][0, s, g], x["beta"][0, s, g])
                logit = K**-0.5 * x["k"][0, j, g] @ product @ x["q"][0, i, h]
                logits.append(logit + x["log_forget"][0, j + 1 : i + 1, h].sum())
            o_V = torch.stack(logits).softmax(0) @ x["v"][0, : i + 1, g]
            torch.testing.assert_close(found[0, i, h], o_V, rtol=1e-12, atol=1e-13)


def test_without_maps_and_gates_it_is_softmax_attention():
    x = make_inputs(200, "softmax")
    expected = softmax_attention_reference(x["q"][0], x["k"][0], x["v"][0], [200], scale=K**-0.5)
    torch.testing.assert_close(run(x)[0], expected, rtol=1e-10, atol=1e-12)


def test_beta_0_is_the_identity():
    x = make_inputs(200, "path")
    x["beta"] = torch.zeros_like(x["beta"])
    plain = {n: x[n] for n in ("q", "k", "v")}
    torch.testing.assert_close(run(x), run(plain), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["path", "path-fox", "fox"])
def test_low_precision_is_calibrated(dtype, form):
    assert_calibrated(make_inputs(300, form, dtype=dtype))


def test_low_precision_with_reflections_alone_is_calibrated():
    """beta = 2: the maps are orthogonal, nothing fades."""
    inputs = make_inputs(300, "path", dtype=torch.float32)
    inputs["beta"] = torch.full_like(inputs["beta"], 2.0).requires_grad_()
    assert_calibrated(inputs)


def test_weak_gates_beside_strong_ones_are_accurate():
    """Differences of running sums would lose the weak ones behind the strong, ever more of them."""
    inputs = make_inputs(600, "path-fox", dtype=torch.float32)
    log_forget = -0.01 * torch.ones(1, 600, H)
    log_forget[:, 3::50] = -300.0
    inputs["log_forget"] = log_forget.requires_grad_()
    assert_calibrated(inputs)


@pytest.mark.parametrize("log_forget", [-50.0, -1e4, float("-inf")])
def test_strong_gates_are_finite(log_forget):
    inputs = make_inputs(200, dtype=torch.float32)
    inputs["log_forget"] = torch.full((1, 200, H), log_forget).requires_grad_()
    for name, x in results(inputs).items():
        assert x.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_no_document_leaks_into_another(changed, dtype):
    """Changing one document leaves the others' outputs and gradients equal to the bit."""
    lengths = [170, 33, 97]
    options = {"cu_seqlens": torch.tensor([0, 170, 203, 300], dtype=torch.int32)}
    inputs, other = (make_inputs(300, dtype=dtype, seed=seed) for seed in (0, 1))
    mixed = {}
    for name, x in inputs.items():
        parts = list(x.detach().split(lengths, dim=1))
        parts[changed] = other[name].detach().split(lengths, dim=1)[changed]
        mixed[name] = torch.cat(parts, dim=1).requires_grad_()
    before, after = results(inputs, **options), results(mixed, **options)
    for name in before:
        pairs = zip(before[name].split(lengths, 1), after[name].split(lengths, 1), strict=True)
        for document, (x, y) in enumerate(pairs):
            assert torch.equal(x, y) == (document != changed), (name, document)


def test_backward_keeps_the_inputs_and_the_log_sum_exp():
    inputs = make_inputs(1024, dtype=torch.bfloat16)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o_BTHV = run(inputs)
    assert sum(kept.values()) <= sum(x.nbytes for x in inputs.values()) + 4 * 1024 * H
    o_BTHV.sum().backward()


def peak_bytes(T, form):
    """Of forward and backward, inputs left out."""
    inputs = make_inputs(T, form, dtype=torch.float32)
    allocations = Allocations()
    allocations.ignore(inputs.values())
    with allocations:
        run(inputs).sum().backward()
    return allocations.peak


@pytest.mark.parametrize("form", ["path-fox", "fox"])
def test_peak_memory_grows_linearly(form):
    short, middle, long = (peak_bytes(T, form) for T in (256, 512, 1024))
    assert middle - short == pytest.approx((long - middle) / 2, rel=0.01)


@pytest.mark.parametrize("prefill", [1, 100])
@pytest.mark.parametrize("form", FORMS)
def test_decode_continues_the_prefill(form, prefill):
    """The segment's carried keys are the cache; two sequences, one of them a token behind."""
    x = {n: y.detach() for n, y in make_inputs(130, form, B=2).items()}
    o_BTHV = run(x)
    gates = ("w", "beta", "log_forget")
    caches = [
        path_segment(*(x[n][b : b + 1, : prefill - b] if n in x else None for n in ("k", *gates)))
        for b in range(2 if prefill > 1 else 1)
    ]
    B = len(caches)
    k, v = torch.zeros(B, 131, G, K).double(), torch.zeros(B, 131, G, V).double()
    gate = torch.zeros(B, 131, H).double() if "log_forget" in x else None
    for b, cache in enumerate(caches):
        k[b, : prefill - b], v[b, : prefill - b] = cache.k_BTGK[0], x["v"][b, : prefill - b]
        if gate is not None:
            gate[b, : prefill - b] = cache.gate_after_BTH[0]
    length = torch.tensor([prefill - b for b in range(B)])
    row = torch.arange(B)
    for _ in range(prefill, 130):
        new = {n: y[row, length] for n, y in x.items()}
        o_BHV = path_attention_step(
            k, v, gate, length, new["q"], new["k"], new["v"], *(new.get(n) for n in gates)
        )
        torch.testing.assert_close(o_BHV, o_BTHV[row, length], rtol=1e-10, atol=1e-12)
        length += 1


def test_decode_stays_exact_over_8192_steps():
    """fp32: the cached keys, updated 8,191 times in place, and the last output."""
    T = 8192
    x = make_inputs(T, groups=1, dtype=torch.float32)
    x = {n: y.detach()[:, :, :1] for n, y in x.items()}
    k, v, gate = torch.zeros(1, T, 1, K), torch.zeros(1, T, 1, V), torch.zeros(1, T, 1)
    for t in range(T):
        new = [y[:, t] for y in x.values()]
        seen = 1 << max(t, 63).bit_length()
        o_BHV = path_attention_step(
            k[:, :seen], v[:, :seen], gate[:, :seen], torch.tensor([t]), *new
        )
    exact = {n: y.double() for n, y in x.items()}
    segment = path_segment(*(exact[n] for n in ("k", "w", "beta", "log_forget")))
    assert error(k, segment.k_BTGK) < 3e-6
    assert error(gate, segment.gate_after_BTH) < 3e-6
    past = {n: y[:, :-1] for n, y in exact.items()}
    before = path_segment(*(past[n] for n in ("k", "w", "beta", "log_forget")))
    last = {n: y[:, -1:] for n, y in exact.items()}
    expected = path_attention(
        *last.values(),
        past=PastKeys(before.k_BTGK, past["v"], before.gate_after_BTH),
    )
    assert error(o_BHV, expected[:, 0]) < 3e-6


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 0, H, K)}, r"q_BTHK is \[1, 0, 4, 16\]"),
        ({"k": torch.zeros(1, 5, 3, K)}, r"k_BTGK is \[1, 5, 3, 16\].*G dividing 4"),
        ({"v": torch.zeros(1, 5, 1, V)}, r"v_BTGV is \[1, 5, 1, 6\], expected \[1, 5, 2, V\]"),
        ({"v": torch.zeros(1, 5, G, V).half()}, r"v_BTGV is torch.float16 .*torch.float32"),
        ({"w": torch.zeros(1, 5, H, K)}, r"w_BTGK is \[1, 5, 4, 16\], expected \[1, 5, 2, 16\]"),
        ({"w": torch.zeros(1, 5, G, K).bfloat16()}, r"w_BTGK is torch.bfloat16 .*expected fp32"),
        ({"w": None}, r"w_BTGK and beta_BTG come together"),
        ({"beta": torch.zeros(1, 5, H)}, r"beta_BTG is \[1, 5, 4\], expected \[1, 5, 2\]"),
        ({"log_forget": torch.zeros(1, 5, G)}, r"log_forget_BTH is \[1, 5, 2\], .*\[1, 5, 4\]"),
        ({"log_forget": None}, r"past.gate_after_BPH and log_forget_BTH come together"),
        ({"past_k": torch.zeros(1, 3, H, K)}, r"past.k_BPGK is \[1, 3, 4, 16\]"),
        ({"past_v": torch.zeros(1, 2, G, V)}, r"past.v_BPGV is \[1, 2, 2, 6\]"),
        ({"past_gate": torch.zeros(1, 3, G)}, r"past.gate_after_BPH is \[1, 3, 2\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens is \[0, 5\], expected .* 0 to 8"),
        ({"max_seqlen": 0}, r"max_seqlen is 0, expected at least 1"),
        ({"backend": "loop"}, r"backend is 'loop', expected one of block, triton, reference"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = make_inputs(5, past=3, dtype=torch.float32) | change
    options = {n: arguments.pop(n) for n in ("cu_seqlens", "max_seqlen", "backend") if n in change}
    with pytest.raises(ValueError, match=message):
        run(arguments, **options)
