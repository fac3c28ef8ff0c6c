"""The forms of log-linear attention against its definition, and the definition against the plain
recurrences that it contains."""

import pytest
import torch
import torch.nn.functional as F

from mixtron.kernels.delta_rule import delta_rule
from mixtron.kernels.gated_linear_attention import gated_linear_attention
from mixtron.kernels.log_linear_attention import (
    bits,
    chunk,
    continue_states,
    log_linear_attention,
    log_linear_segment_map,
    log_linear_step,
    node_start,
    required_levels,
)
from mixtron.kernels.log_linear_attention.fenwick import level_masks
from tests.helpers.numerics import assert_close_calibrated

H, J, K, V = 1, 2, 4, 3
BASES = ("gated_linear", "gated_delta")
NAMES = ("q", "k", "v", "log_decay", "beta", "lambda", "states")
over_bases = pytest.mark.parametrize("base", BASES)


def make_inputs(T, base, *, B=1, levels=11, dtype=torch.float64, seed=0):
    """q, k, v in dtype; the others in at least fp32; lambda of either sign and 0; all leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_dtype = torch.promote_types(dtype, torch.float32)
    lambda_BTJL = draw(B, T, J, levels)
    inputs = [
        draw(B, T, H, K).to(dtype),
        F.normalize(draw(B, T, H, K), dim=-1).to(dtype),
        draw(B, T, J, V).to(dtype),
        (-0.1 * draw(B, T, J).exp()).to(gate_dtype),
        draw(B, T, J).sigmoid().to(gate_dtype) if base == "gated_delta" else None,
        (lambda_BTJL * (lambda_BTJL.abs() > 0.3)).to(gate_dtype),
        draw(B, levels, J, K, V).to(gate_dtype),
    ]
    return [x if x is None else x.requires_grad_() for x in inputs]


def to_dtype(inputs, dtype):
    return [x if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]


def run(inputs, **options):
    *tokens, states = inputs
    return log_linear_attention(*tokens, initial_states_BSJKV=states, **options)


def results(inputs, function=run, **options):
    """The output and the gradient of every input."""
    o_BTJV = function(inputs, **options)
    generator = torch.Generator().manual_seed(99)
    weights = torch.randn(o_BTJV.shape, generator=generator, dtype=torch.float64)
    named = {n: x for n, x in zip(NAMES, inputs, strict=True) if x is not None}
    gradients = torch.autograd.grad(
        (o_BTJV * weights.to(o_BTJV.dtype)).sum(),
        list(named.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    found = {"o": o_BTJV} | {f"d{name}": g for name, g in zip(named, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def assert_equal_fp64(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        tolerance = 1e-12 * float(x.abs().max())
        torch.testing.assert_close(
            found[name], x, rtol=1e-9, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_forms_agree(inputs, backends=("chunk", "recurrent"), **options):
    expected = results(inputs, backend="reference", **options)
    for backend in backends:
        assert_equal_fp64(results(inputs, backend=backend, **options), expected)


def test_buckets_partition_the_past():
    """Every earlier token lies in exactly one node of t, whose level is bit_length(t xor s)."""
    for t in range(1, 1100):
        nodes = {b: range(node_start(t, b), node_start(t, b) + 2**b) for b in bits(t)}
        assert sorted(s for node in nodes.values() for s in node) == list(range(t))
        assert all((t ^ s).bit_length() == b + 1 for b, node in nodes.items() for s in node)
        assert 1 + len(nodes) <= required_levels(t + 1)
    masks = level_masks(64)
    for i, j in ((0, 0), (63, 0), (37, 36), (48, 21)):
        assert masks[:, i, j].nonzero()[0].tolist() == [(i ^ j).bit_length()]
    assert not masks[:, 3, 4].any()


@over_bases
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127])
def test_forms_agree(T, base):
    assert_forms_agree(make_inputs(T, base, B=2))


@over_bases
def test_forms_agree_on_a_long_document(base):
    inputs = make_inputs(1000, base)
    expected = results(inputs, backend="recurrent")
    assert_equal_fp64(results(inputs), expected)
    o_BTJV = run(to_dtype(inputs, torch.float64), backend="reference")
    torch.testing.assert_close(expected["o"], o_BTJV.detach(), rtol=1e-9, atol=1e-12)


@over_bases
@pytest.mark.parametrize(
    ("lengths", "position"),
    [([3, 1, 130, 64, 2], 0), ([64, 136], 64), ([200], 37), ([30, 170], 100), ([1, 199], 191)],
    ids=str,
)
def test_packed_documents_and_a_tree_that_goes_on(lengths, position, base):
    """Documents begin anywhere in a chunk; the first goes on from a tree of any position."""
    inputs = make_inputs(200, base)
    assert_forms_agree(inputs, lengths=lengths, initial_position=position)


@over_bases
def test_states_of_bits_that_the_position_lacks_are_ignored(base):
    inputs = make_inputs(70, base)
    found = results(inputs, initial_position=0b100101)
    used = found["dstates"].flatten(2).abs().sum((0, 2)) > 0
    assert used.nonzero()[:, 0].tolist() == [0, 2, 5]


@over_bases
def test_segments_do_not_change_the_result(base, monkeypatch):
    inputs = make_inputs(400, base)
    options = {"lengths": [70, 330], "initial_position": 21}
    whole = results(inputs, **options)
    monkeypatch.setattr(chunk, "SEGMENT_CHUNKS", 4)  # two chunks a segment
    assert_equal_fp64(results(inputs, **options), whole)


@over_bases
def test_packed_equals_each_document_alone(base):
    lengths = [3, 1, 130, 64, 59]
    *tokens, _ = make_inputs(sum(lengths), base)
    packed = log_linear_attention(*tokens, lengths=lengths)
    parts = [[None] * 5 if x is None else x.split(lengths, dim=1) for x in tokens]
    alone = [log_linear_attention(*document) for document in zip(*parts, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-12)


@over_bases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_no_document_leaks_into_another(changed, dtype, base):
    """Changing one document leaves the others' outputs and gradients equal to the bit."""
    lengths = [70, 33, 97]
    inputs, other = (make_inputs(200, base, dtype=dtype, seed=s) for s in (0, 1))
    mixed = []
    for x, y in zip(inputs[:-1], other[:-1], strict=True):
        if x is None:
            mixed.append(None)
            continue
        parts = list(x.detach().split(lengths, dim=1))
        parts[changed] = y.detach().split(lengths, dim=1)[changed]
        mixed.append(torch.cat(parts, dim=1).requires_grad_())
    before, after = (results(x, lengths=lengths) for x in (inputs, [*mixed, inputs[-1]]))
    for name in before.keys() - {"dstates"}:
        pairs = zip(before[name].split(lengths, 1), after[name].split(lengths, 1), strict=True)
        for document, (x, y) in enumerate(pairs):
            assert torch.equal(x, y) == (document != changed), (name, document)


def split_run(inputs, split, position, **options):
    """In two parts: the second starts from the states that the first one's map gives."""
    *tokens, states = inputs
    total = tokens[0].shape[1]
    sizes = [split, total - split]
    parts = [[None] * 2 if x is None else x.split(sizes, dim=1) for x in tokens]
    first, second = zip(*parts, strict=True)
    segment_map = log_linear_segment_map(
        *first[1:5], levels=states.shape[1], initial_position=position
    )
    later = continue_states(states, position, split, segment_map)
    return torch.cat(
        [
            log_linear_attention(*first, initial_states_BSJKV=states, initial_position=position),
            log_linear_attention(
                *second, initial_states_BSJKV=later, initial_position=position + split
            ),
        ],
        dim=1,
    )


@over_bases
@pytest.mark.parametrize(("split", "position"), [(1, 0), (64, 0), (100, 0), (139, 21), (5, 60)])
def test_split_sequence_equals_whole(split, position, base, monkeypatch):
    inputs = make_inputs(140, base)
    whole = results(inputs, initial_position=position)
    monkeypatch.setattr(chunk, "SEGMENT_CHUNKS", 2)
    parts = results(inputs, lambda x: split_run(x, split, position))
    assert_equal_fp64(parts, whole)


@over_bases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_calibrated(dtype, base):
    inputs = make_inputs(200, base, dtype=dtype)
    options = {"lengths": [150, 50], "initial_position": 70}
    exact = results(to_dtype(inputs, torch.float64), backend="reference", **options)
    low = results(inputs, backend="reference", **options)
    for name, x in results(inputs, **options).items():
        assert_close_calibrated(x, exact[name], low[name], name)


@over_bases
@pytest.mark.parametrize("log_decay", [-50.0, -1e4, float("-inf")])
def test_strong_decay_is_finite(log_decay, base):
    inputs = make_inputs(200, base, dtype=torch.float32)
    inputs[3] = torch.full((1, 200, J), log_decay).requires_grad_()
    assert all(bool(x.isfinite().all()) for x in results(inputs).values())


def plain(base, tokens, **options):
    """The base without a tree."""
    q, k, v, log_decay, beta, _ = tokens
    if base == "gated_linear":
        return gated_linear_attention(q, k, v, log_decay, **options)[0]
    return delta_rule(q, k, v, log_decay, beta, step_size="learned", **options)[0]


@over_bases
def test_every_lambda_one_is_the_plain_base(base):
    *tokens, states = [None if x is None else x.detach() for x in make_inputs(300, base)]
    tokens[5] = torch.ones_like(tokens[5])
    options = {"cu_seqlens": torch.tensor([0, 170, 300])}
    expected = plain(base, tokens, **options)
    found = log_linear_attention(*tokens, lengths=[170, 130])
    assert float((found - expected).abs().max()) < 1e-12 * float(expected.abs().max())
    # A tree in the middle: its nodes sum to the plain state.
    expected = plain(base, tokens, initial_state_BJKV=states[:, [0, 2, 4]].sum(1))
    found = log_linear_attention(*tokens, initial_states_BSJKV=states, initial_position=0b10101)
    assert float((found - expected).abs().max()) < 1e-12 * float(expected.abs().max())


@over_bases
@pytest.mark.parametrize("top", [0, 1, 4, 7])
def test_zero_above_a_level_is_a_reset_at_multiples(top, base):
    *tokens, _ = make_inputs(300, base)
    tokens[5] = (torch.arange(11) <= top).double().expand_as(tokens[5])
    starts = torch.arange(0, 300 + 2**top, 2**top).clamp(max=300)
    expected = plain(base, tokens, cu_seqlens=starts)
    torch.testing.assert_close(log_linear_attention(*tokens), expected, rtol=1e-10, atol=1e-12)


def test_backward_keeps_little_more_than_the_inputs():
    *tokens, _ = make_inputs(1024, "gated_delta", dtype=torch.bfloat16)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o_BTJV = log_linear_attention(*tokens)
    states_bytes = 11 * J * K * V * 4
    assert sum(kept.values()) <= sum(x.nbytes for x in tokens) + 2 * states_bytes
    o_BTJV.sum().backward()


@over_bases
def test_decode_continues_the_prefill_with_few_states(base):
    """States are held only for set bits, so their number is counted, and each read is right."""
    T, prefill = 140, 37
    *tokens, _ = make_inputs(T, base, B=2)
    whole = log_linear_attention(*tokens)
    prompt = [x if x is None else x[:, :prefill] for x in tokens]
    _, states = log_linear_segment_map(*prompt[1:5], levels=required_levels(T))
    for t in range(prefill, T):
        states = states[:, : (t + 1).bit_length()]
        read = 1 + int((states.flatten(2).abs().sum((0, 2)) > 0).sum())
        assert read == 1 + t.bit_count() <= required_levels(T)
        token = [x if x is None else x[:, t] for x in tokens]
        states = F.pad(states, (0, 0) * 3 + (0, (t + 1).bit_length() - states.shape[1]))
        assert states.shape[1] <= required_levels(T)
        o_BJV, states = log_linear_step(states, torch.tensor([t, t]), *token)
        torch.testing.assert_close(o_BJV, whole[:, t], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": 3}, r"lambda_BTJL has 3 levels, a document of 5 tokens needs 4"),
        ({"initial_position": 12}, r"has 5 levels, a document of 17 tokens needs 6"),
        ({"lengths": [2, 2]}, r"lengths is \[2, 2\], expected positive ones that sum to 5"),
        ({"lengths": [5, 0]}, r"lengths is \[5, 0\]"),
        ({"initial_position": -1}, r"initial_position is -1"),
        ({"states": torch.zeros(1, 4, J, K, V)}, r"initial_states_BSJKV is \[1, 4, 2, 4, 3\]"),
        ({"beta": torch.zeros(1, 5)}, r"beta_BTJ is \[1, 5\], expected \[1, 5, 2\]"),
        ({"lambda": torch.zeros(1, 5, J, 5).bfloat16()}, r"lambda_BTJL is torch.bfloat16"),
        ({"backend": "loop"}, r"backend is 'loop', expected one of chunk, triton, recurrent"),
    ],
)
def test_bad_arguments_are_named(change, message):
    levels = change.pop("levels", 5)
    inputs = make_inputs(5, "gated_delta", levels=levels, dtype=torch.float32)
    arguments = dict(zip(NAMES, inputs, strict=True)) | change
    positional = [arguments.pop(name) for name in NAMES[:-1]]
    with pytest.raises(ValueError, match=message):
        log_linear_attention(*positional, initial_states_BSJKV=arguments.pop("states"), **arguments)
