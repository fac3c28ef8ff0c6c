"""The chunked delta rule against the recurrence, and the recurrence against the paper's claims."""

import pytest
import torch
import torch.nn.functional as F

from mixtron.kernels.delta_rule import (
    chunk,
    delta_rule,
    delta_rule_reference,
    delta_rule_step,
)
from tests.helpers.numerics import assert_close_calibrated

H, K, V = 2, 8, 6
STEP_SIZES = ("kaczmarz", "learned", "longhorn")
NAMES = ("q", "k", "v", "log_decay", "eta", "initial_state")


def make_inputs(T, *, B=1, J=H, dtype=torch.float64, decay=True, step_size="kaczmarz", seed=0):
    """q, k, v in dtype; log decay, eta and the initial state in at least fp32; all leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_dtype = torch.promote_types(dtype, torch.float32)
    k_BTHK = draw(B, T, H, K)
    if step_size == "learned":
        k_BTHK = F.normalize(k_BTHK, dim=-1)
    inputs = [
        F.normalize(draw(B, T, H, K), dim=-1).to(dtype),
        k_BTHK.to(dtype),
        draw(B, T, J, V).to(dtype),
        (-0.3 * draw(B, T, J).exp()).to(gate_dtype) if decay else None,
        draw(B, T, J).sigmoid().to(gate_dtype),
        draw(B, J, K, V).to(gate_dtype),
    ]
    return [x if x is None else x.requires_grad_() for x in inputs]


def to_dtype(inputs, dtype):
    return [x if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]


def run(inputs, **options):
    *tokens, initial_state = inputs
    return delta_rule(*tokens, initial_state_BJKV=initial_state, **options)


def results(inputs, function=run, **options):
    """Output, final state, and the gradient of every input through both at once."""
    o_BTJV, state_BJKV = function(inputs, **options)
    generator = torch.Generator().manual_seed(99)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum()
        for x in (o_BTJV, state_BJKV)
    )
    named = {n: x for n, x in zip(NAMES, inputs, strict=True) if x is not None}
    gradients = torch.autograd.grad(loss, list(named.values()))
    found = {"o": o_BTJV, "state": state_BJKV}
    found |= {f"d{name}": g for name, g in zip(named, gradients, strict=True)}
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


@pytest.mark.parametrize("decay", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("step_size", STEP_SIZES)
@pytest.mark.parametrize("J", [H, 2 * H])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200, 400])
def test_chunk_equals_reference(T, J, step_size, decay):
    inputs = make_inputs(T, B=2, J=J, decay=decay, step_size=step_size)
    expected = results(inputs, step_size=step_size, backend="reference")
    assert_equal_fp64(results(inputs, step_size=step_size), expected)


@pytest.mark.parametrize("step_size", STEP_SIZES)
@pytest.mark.parametrize("decay", [True, False], ids=["gated", "ungated"])
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
def test_packed_chunk_equals_reference(cu_seqlens, decay, step_size):
    inputs = make_inputs(257, J=2 * H, decay=decay, step_size=step_size)
    options = {"step_size": step_size, "cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32)}
    assert_equal_fp64(results(inputs, **options), results(inputs, backend="reference", **options))


def test_packed_equals_each_document_alone():
    lengths = [3, 1, 130, 64, 59]
    *tokens, initial_state = make_inputs(sum(lengths), J=2 * H)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    o_BTJV, state_BJKV = delta_rule(
        *tokens, step_size="kaczmarz", initial_state_BJKV=initial_state, cu_seqlens=ends
    )
    alone = []
    for n, document in enumerate(zip(*(x.split(lengths, dim=1) for x in tokens), strict=True)):
        first = initial_state if n == 0 else None
        o, last_state = delta_rule(*document, step_size="kaczmarz", initial_state_BJKV=first)
        alone.append(o)
    torch.testing.assert_close(o_BTJV, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state_BJKV, last_state, rtol=1e-10, atol=1e-12)


def test_segments_do_not_change_the_result(monkeypatch):
    inputs = make_inputs(257, B=2)
    options = {"step_size": "kaczmarz"}
    whole = results(inputs, **options)
    monkeypatch.setattr(chunk, "SEGMENT_CHUNKS", 8)  # two chunks a segment
    assert_equal_fp64(results(inputs, **options), whole)


def test_backward_keeps_little_more_than_the_inputs():
    *tokens, _ = make_inputs(1024, B=2, dtype=torch.bfloat16)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o_BTJV, _ = delta_rule(*tokens, step_size="kaczmarz")
    state_bytes = 2 * H * K * V * 4
    assert sum(kept.values()) <= sum(x.nbytes for x in tokens) + 2 * state_bytes
    o_BTJV.sum().backward()


@pytest.mark.parametrize("split", [1, 64, 100, 199])
def test_split_sequence_equals_whole(split):
    """The final state of one part, given to the next, continues it, forwards and backwards."""

    def in_two_parts(inputs, **options):
        *tokens, state = inputs
        outputs = []
        for part in zip(*(x.split([split, 200 - split], dim=1) for x in tokens), strict=True):
            o_BTJV, state = run([*part, state], **options)
            outputs.append(o_BTJV)
        return torch.cat(outputs, dim=1), state

    inputs = make_inputs(200, J=2 * H)
    expected = results(inputs, step_size="kaczmarz")
    assert_equal_fp64(results(inputs, in_two_parts, step_size="kaczmarz"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_no_document_leaks_into_another(changed, dtype):
    """Changing one document leaves the others' outputs and gradients equal to the bit."""
    lengths = [70, 33, 97]
    cu_seqlens = torch.tensor([0, 70, 103, 200], dtype=torch.int32)
    inputs = make_inputs(200, J=2 * H, dtype=dtype)
    other = make_inputs(200, J=2 * H, dtype=dtype, seed=1)
    mixed = []
    for x, y in zip(inputs[:-1], other[:-1], strict=True):
        parts = list(x.detach().split(lengths, dim=1))
        parts[changed] = y.detach().split(lengths, dim=1)[changed]
        mixed.append(torch.cat(parts, dim=1).requires_grad_())
    options = {"step_size": "kaczmarz", "cu_seqlens": cu_seqlens}
    before = results(inputs, **options)
    after = results([*mixed, inputs[-1]], **options)
    for name in ("o", *(f"d{n}" for n in NAMES[:-1])):
        pairs = zip(before[name].split(lengths, 1), after[name].split(lengths, 1), strict=True)
        for document, (x, y) in enumerate(pairs):
            assert torch.equal(x, y) == (document != changed), (name, document)


@pytest.mark.parametrize("step_size", STEP_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_calibrated(dtype, step_size):
    inputs = make_inputs(200, J=2 * H, dtype=dtype, step_size=step_size)
    assert_calibrated(inputs, step_size=step_size)


@pytest.mark.parametrize("step_size", ["kaczmarz", "longhorn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_and_uneven_key_norms(dtype, step_size):
    """Norms spread over orders of magnitude, where the raw form's intra-chunk matrix explodes."""
    inputs = make_inputs(200, dtype=dtype)
    norms = torch.randn(1, 200, H, 1, generator=torch.Generator().manual_seed(5))
    inputs[1] = (inputs[1].detach() * (1.5 * norms).exp()).to(dtype).requires_grad_()
    assert_calibrated(inputs, step_size=step_size)


def test_weak_decays_beside_strong_ones_are_accurate():
    """Prefix sums of log decays would lose the small ones after the large ones."""
    inputs = make_inputs(200, dtype=torch.float32)
    log_decay = -0.01 * torch.ones(1, 200, H)
    log_decay[:, 3::16] = -500.0
    inputs[3] = log_decay.requires_grad_()
    assert_calibrated(inputs, step_size="kaczmarz")


@pytest.mark.parametrize("log_decay", [-50.0, -1e4, float("-inf")])
def test_strong_decay_is_finite(log_decay):
    inputs = make_inputs(200, dtype=torch.float32)
    inputs[3] = torch.full((1, 200, H), log_decay).requires_grad_()
    options = {"step_size": "kaczmarz"}
    expected = results(inputs, backend="reference", **options)
    for name, x in results(inputs, **options).items():
        assert x.isfinite().all(), name
        torch.testing.assert_close(x, expected[name], rtol=1e-5, atol=1e-5)


def write_once(step_size, eta=1.0, eps=0.0):
    """One write of (k, v) into a random state without decay."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"state": (1, 1, K, V), "q": (1, 1, K), "k": (1, 1, K), "v": (1, 1, V)}
    x = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    eta_BJ = torch.full((1, 1), eta, dtype=torch.float64)
    _, new = delta_rule_step(
        x["state"], x["q"], x["k"], x["v"], None, eta_BJ, step_size=step_size, eps=eps
    )
    return x["state"][0, 0], new[0, 0], x["k"][0, 0], x["v"][0, 0]


def test_kaczmarz_write_is_the_orthogonal_projection():
    """S' solves S'^T k = v and is the nearest such state: the change is orthogonal to that set."""
    state, new, k, v = write_once("kaczmarz")
    torch.testing.assert_close(new.T @ k, v, rtol=1e-12, atol=1e-12)
    feasible_directions = torch.linalg.qr(k[:, None], mode="complete").Q[:, 1:]
    torch.testing.assert_close(
        feasible_directions.T @ (new - state), torch.zeros(K - 1, V).double()
    )


def test_kaczmarz_write_is_the_exact_line_search():
    """Among all steps along the gradient of |v - S^T k|^2 / 2, it takes the best one."""
    state, new, k, v = write_once("kaczmarz")
    gradient = -torch.outer(k, v - state.T @ k)
    # The loss along the gradient is a parabola in the step; three points give its minimum.
    low, middle, high = ((v - (state - s * gradient).T @ k).square().sum() for s in (-1, 0, 1))
    best = (low - high) / (2 * (low - 2 * middle + high))
    torch.testing.assert_close(new, state - best * gradient, rtol=1e-10, atol=1e-10)


def test_kaczmarz_write_has_the_norm_of_the_error_over_the_keys():
    state, new, k, v = write_once("kaczmarz")
    expected = (v - state.T @ k).norm() / k.norm()
    torch.testing.assert_close((new - state).norm(), expected, rtol=1e-12, atol=0)


def test_longhorn_write_minimises_its_objective():
    """S' = argmin |X - S|^2 + eta |v - X^T k|^2: the objective's gradient vanishes there."""
    state, new, k, v = write_once("longhorn", eta=0.7)
    gradient = (new - state) - 0.7 * torch.outer(k, v - new.T @ k)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_recurrence_equals_its_matrix_form():
    """S_t = alpha (I - beta k k^T) S_{t-1} + beta k v^T, written for one head."""
    q, k, v, log_decay, eta, state = (x.detach() for x in make_inputs(20))
    o_BTJV, final = delta_rule_reference(
        q, k, v, log_decay, eta, step_size="kaczmarz", scale=0.5, initial_state_BJKV=state
    )
    S = state[0, 1]
    for t in range(20):
        key, beta = k[0, t, 1], eta[0, t, 1] / (k[0, t, 1] @ k[0, t, 1] + 1e-6)
        forget = log_decay[0, t, 1].exp() * (torch.eye(K).double() - beta * torch.outer(key, key))
        S = forget @ S + beta * torch.outer(key, v[0, t, 1])
        torch.testing.assert_close(o_BTJV[0, t, 1], 0.5 * S.T @ q[0, t, 1])
    torch.testing.assert_close(final[0, 1], S)


def test_kla_equals_gated_deltanet_on_rescaled_inputs():
    q, k, v, log_decay, eta, state = make_inputs(200)
    r = (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    options = {"initial_state_BJKV": state, "backend": "reference"}
    kla = delta_rule(q, k, v, log_decay, eta, step_size="kaczmarz", **options)
    gdn = delta_rule(q, r * k, r * v, log_decay, eta, step_size="learned", **options)
    for x, y in zip(kla, gdn, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prefill", [0, 64, 100])
@pytest.mark.parametrize("step_size", STEP_SIZES)
def test_decode_continues_the_chunked_prefill(step_size, prefill):
    *tokens, state = make_inputs(130, B=2, J=2 * H, step_size=step_size)
    o_BTJV, final = run([*tokens, state], step_size=step_size)
    if prefill:
        _, state = run([*(x[:, :prefill] for x in tokens), state], step_size=step_size)
    for t in range(prefill, 130):
        o_BJV, state = delta_rule_step(state, *(x[:, t] for x in tokens), step_size=step_size)
        torch.testing.assert_close(o_BJV, o_BTJV[:, t], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 5, 3, K)}, r"k_BTHK is \[1, 5, 3, 8\], expected q's \[1, 5, 2, 8\]"),
        ({"v": torch.zeros(1, 5, 3, V)}, r"v_BTJV is \[1, 5, 3, 6\].*multiple of 2"),
        ({"v": torch.zeros(1, 5, 2, V).half()}, r"v_BTJV is torch.float16 .*torch.float32"),
        ({"q": torch.zeros(1, 0, 2, K)}, r"q_BTHK is \[1, 0, 2, 8\]"),
        ({"eta": torch.zeros(1, 5)}, r"eta_BTJ is \[1, 5\], expected \[1, 5, 2\]"),
        ({"log_decay": torch.zeros(1, 5, 2).bfloat16()}, r"log_decay_BTJ is torch.bfloat16"),
        ({"initial_state": torch.zeros(1, 2, V, K)}, r"initial_state_BJKV is \[1, 2, 6, 8\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens is \[0, 3\], expected .* 0 to 5"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, r"cu_seqlens is \[0, 4, 3, 5\]"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, r"cu_seqlens is torch.float32"),
        ({"step_size": "kaczmars"}, r"step_size is 'kaczmars', expected one of kaczmarz, learned"),
        ({"backend": "cuda"}, r"backend is 'cuda', expected one of chunk, triton, reference"),
        ({"rows": 2}, r"rows is 2, expected a divisor of T = 5"),
        ({"rows": 5}, r"rows is 5, expected .* and cu_seqlens beside it"),
        (
            {"rows": 5, "cu_seqlens": torch.tensor([0, 1, 5])},
            r"rows is 5: no document of \[0, 1, 5\] begins at each row",
        ),
        ({"backend": "triton"}, r"q_BTHK is torch.float32 on cpu: the triton form takes bf16 on"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = dict(zip(NAMES, make_inputs(5, dtype=torch.float32), strict=True))
    arguments |= {"step_size": "kaczmarz"} | change
    state = arguments.pop("initial_state")
    positional = [arguments.pop(name) for name in NAMES[:-1]]
    with pytest.raises(ValueError, match=message):
        delta_rule(*positional, initial_state_BJKV=state, **arguments)


def test_packed_documents_need_one_row():
    *tokens, _ = make_inputs(5, B=2)
    with pytest.raises(
        ValueError, match=r"cu_seqlens needs a batch of 1, q_BTHK is \[2, 5, 2, 8\]"
    ):
        delta_rule(*tokens, step_size="kaczmarz", cu_seqlens=torch.tensor([0, 5]))
