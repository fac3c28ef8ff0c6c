"""Windowed attention: the tiled form against the dense one, and what the masks promise."""

import math
from itertools import pairwise

import pytest
import torch

from mixtron.kernels.softmax_attention import softmax_attention_reference
from mixtron.kernels.windowed_attention import (
    attended_pairs,
    document_permutation,
    plan_windows,
    window_reach,
    windowed_attention,
    windowed_attention_reference,
)
from mixtron.kernels.windowed_attention.plan import TILE
from tests.helpers.numerics import assert_close_calibrated

K, V = 8, 6
SCALE = K**-0.5
PACKED = [1, 7, 64, 1, 57, 131]
SIDES = ("two", "one")
either_side = pytest.mark.parametrize("window_side", SIDES)


def make_inputs(T: int, heads: int = 4, kv_heads: int = 2, dtype=torch.float64) -> list:
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, heads, K), (T, kv_heads, K), (T, kv_heads, V)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


def offsets(lengths: list[int]) -> torch.Tensor:
    """Padded, as a batch has them."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(3)]).to(torch.int32)


def draw(lengths: list[int], layer: int = 1) -> torch.Tensor:
    return document_permutation(offsets(lengths), sum(lengths), seed=5, step=3, layer=layer)


def tiled(inputs, lengths, order_T, **options):
    plan = plan_windows(order_T, offsets(lengths), **options)
    return windowed_attention(*inputs, plan, scale=SCALE)


def reference(inputs, lengths, order_T, **options):
    return windowed_attention_reference(*inputs, order_T, lengths, scale=SCALE, **options)


def results(function, inputs, *arguments, **options) -> dict:
    """The output and the gradient of every input."""
    o_THV = function(inputs, *arguments, **options)
    generator = torch.Generator().manual_seed(99)
    weights = torch.randn(o_THV.shape, generator=generator, dtype=torch.float64).to(o_THV.dtype)
    gradients = torch.autograd.grad((o_THV * weights).sum(), inputs)
    return {"o": o_THV.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def in_dtype(inputs, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in inputs]


def assert_equal_fp64(found: dict, expected: dict) -> None:
    """The same sums in another order."""
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equals_reference(inputs, lengths, **options):
    arguments = (inputs, lengths, draw(lengths))
    assert_equal_fp64(
        results(tiled, *arguments, **options), results(reference, *arguments, **options)
    )


@either_side
@pytest.mark.parametrize("window", [1, 2, 7, 64, 300, 10_000])
@pytest.mark.parametrize("T", [1, 63, 65, 321])
def test_equals_reference(T, window, window_side):
    assert_equals_reference(make_inputs(T), [T], window=window, window_side=window_side)


@either_side
@pytest.mark.parametrize("window", [8, 129])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("lengths", [PACKED, [1, 1, 1], [65, 65]], ids=str)
def test_packed_equals_reference(lengths, kv_heads, window, window_side):
    inputs = make_inputs(sum(lengths), kv_heads=kv_heads)
    assert_equals_reference(inputs, lengths, window=window, window_side=window_side)


@pytest.mark.parametrize("window", [256, 700])
def test_segments_of_several_tiles_equal_reference(window):
    assert_equals_reference(make_inputs(1000), [999, 1], window=window, window_side="two")


def test_more_scores_than_one_group_holds(monkeypatch):
    monkeypatch.setattr("mixtron.kernels.windowed_attention.tiled.GROUP_SCORES", 3 * 4 * TILE**2)
    assert_equals_reference(make_inputs(321), [300, 21], window=100, window_side="two")


@either_side
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_calibrated(dtype, window_side):
    inputs, options = make_inputs(sum(PACKED), dtype=dtype), {"window": 40}
    arguments, options = (PACKED, draw(PACKED)), options | {"window_side": window_side}
    exact = results(reference, in_dtype(inputs, torch.float64), *arguments, **options)
    low = results(reference, inputs, *arguments, **options)
    for name, x in results(tiled, inputs, *arguments, **options).items():
        assert_close_calibrated(x, exact[name], low[name], name)


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_one_side_of_the_plain_order_is_sliding_window_attention(window):
    inputs = make_inputs(sum(PACKED))
    inputs[2] = inputs[1]

    def sliding(inputs, lengths, order_T, **options):
        return softmax_attention_reference(*inputs, lengths, scale=SCALE, window=window)

    arguments = (inputs, PACKED, range(sum(PACKED)))
    found = tiled(*arguments, window=window, window_side="one")
    torch.testing.assert_close(found, sliding(*arguments), rtol=1e-10, atol=1e-12)


def test_two_sides_are_full_causal_attention_from_twice_the_length_on():
    n = 50
    inputs = make_inputs(n)
    inputs[2] = inputs[1]
    full = softmax_attention_reference(*inputs, [n], scale=SCALE)
    found = tiled(inputs, [n], draw([n]), window=2 * n - 1, window_side="two")
    torch.testing.assert_close(found, full, rtol=1e-10, atol=1e-12)
    everything = torch.ones(n, n, dtype=torch.bool).tril()
    first_last = torch.arange(n).roll(-1)  # the first token in the last slot
    for window, equal in [(2 * n - 1, True), (2 * n - 3, False)]:
        pairs_TT = attended_pairs(first_last.flip(0), [n], window=window, window_side="two")
        assert torch.equal(pairs_TT, everything) == equal


@either_side
@pytest.mark.parametrize("window", [1, 6, 40, 500])
@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_with_a_halo_equal_the_whole(ranks, window, window_side):
    """As context ranks have it: slots of their own as queries, a halo around them as keys."""
    lengths = [100, 1, 151, 4]
    T, order_T = sum(lengths), draw(lengths)
    q_THK, k_TGK, v_TGV = make_inputs(T)
    options = {"window": window, "window_side": window_side}
    before, after = window_reach(window, window_side)
    generator = torch.Generator().manual_seed(4)

    def by_pieces(inputs, *_, **__):
        q_THK, k_TGK, v_TGV = inputs
        o_THV = torch.zeros(T, 4, V, dtype=q_THK.dtype)
        for first in range(0, T, T // ranks):
            own = range(first, first + T // ranks)
            seen = range(max(first - before, 0), min(own.stop + after, T))
            # Rows in any order, as they arrive from other ranks.
            query_row, key_row = (
                torch.randperm(len(piece), generator=generator) for piece in (own, seen)
            )
            query_token, key_token = (
                order_T[piece.start : piece.stop][row.argsort()]
                for piece, row in ((own, query_row), (seen, key_row))
            )
            plan = plan_windows(
                order_T,
                offsets(lengths),
                **options,
                query_slots=own,
                key_slots=seen,
                query_row_S=query_row,
                key_row_S=key_row,
            )
            o_SHV = windowed_attention(
                q_THK[query_token], k_TGK[key_token], v_TGV[key_token], plan, scale=SCALE
            )
            o_THV = o_THV.index_put((query_token,), o_SHV)
        return o_THV

    arguments = ([q_THK, k_TGK, v_TGV], lengths, order_T)
    assert_equal_fp64(
        results(by_pieces, *arguments, **options), results(reference, *arguments, **options)
    )


@either_side
def test_empty_slots_hold_tokens_that_are_yet_to_come(window_side):
    """A beginning, in the slots of the whole: what comes later changes nothing, being later."""
    capacity, present = 300, 37
    inputs, order_T = make_inputs(capacity), draw([capacity])
    options = {"window": 90, "window_side": window_side}
    early = [x[:present].detach().requires_grad_() for x in inputs]

    def beginning(inputs, *_, **__):
        plan = plan_windows(order_T, offsets([capacity]), **options, tokens=present)
        return windowed_attention(*inputs, plan, scale=SCALE)

    def whole(inputs, *_, **__):
        later = [torch.cat([x, y[present:]]) for x, y in zip(inputs, make_inputs(capacity))]  # noqa: B905
        return reference(later, [capacity], order_T, **options)[:present]

    assert_equal_fp64(results(beginning, early), results(whole, early))


def random_pairs(window, window_side, seed):
    """Of a document of 40 tokens between two others."""
    lengths = [5, 40, 3]
    order_T = document_permutation(offsets(lengths), 48, seed=seed, step=0, layer=1)
    pairs_TT = attended_pairs(order_T, lengths, window=window, window_side=window_side)
    return pairs_TT, order_T, slice(5, 45)


@either_side
@pytest.mark.parametrize("window", [1, 2, 5, 8, 41, 100])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_sees_itself_and_none_the_future_or_another_document(seed, window, window_side):
    pairs_TT, _, document = random_pairs(window, window_side, seed)
    assert pairs_TT.diagonal().all()
    assert not pairs_TT.triu(1).any()
    outside_TT = pairs_TT.clone()
    outside_TT[document, document] = False
    outside_TT[:5, :5], outside_TT[45:, 45:] = False, False
    assert not outside_TT.any()


@either_side
@pytest.mark.parametrize("window", [1, 2, 5, 8, 39])
@pytest.mark.parametrize("seed", range(5))
def test_a_token_visits_exactly_the_window_and_less_at_the_ends(seed, window, window_side):
    """Visits do not look at positions: attention both ways, whose causal half is what we have."""
    pairs_TT, order_T, document = random_pairs(window, window_side, seed)
    slot_T = order_T.argsort()[document] - document.start
    before, after = window_reach(window, window_side)
    assert before + after + 1 == window
    for i in range(40):
        first, last = max(slot_T[i] - before, 0), min(slot_T[i] + after, 39)
        visited = order_T[document][int(first) : int(last) + 1]
        assert len(visited) == min(slot_T[i], before) + 1 + min(39 - slot_T[i], after)
        earlier = visited[visited <= i + document.start]
        assert set(pairs_TT[i + document.start].nonzero()[:, 0].tolist()) == set(earlier.tolist())


@either_side
@pytest.mark.parametrize("window", [4, 9])
def test_expected_number_attended_follows_the_formula(window, window_side):
    """1 + p/(n-1) sum over offsets o != 0 of (n - |o|)/n, within five standard errors."""
    n, draws = 32, 600
    before, after = window_reach(window, window_side)
    offsets_sum = sum((n - abs(o)) / n for o in range(-before, after + 1) if o != 0)
    counts = torch.stack(
        [
            attended_pairs(draw([n], layer=layer), [n], window=window, window_side=window_side).sum(
                1
            )
            for layer in range(draws)
        ]
    ).double()
    expected = 1 + torch.arange(n) / (n - 1) * offsets_sum
    error = (counts.mean(0) - expected).abs()
    assert (error <= 5 * counts.std(0) / math.sqrt(draws)).all(), error
    # Over all positions: about half of the window.
    assert counts.mean() == pytest.approx(1 + offsets_sum / 2, rel=0.02)


def listed_pairs(mine, lists, others) -> torch.Tensor:
    """[tokens, tokens] int: how often a tile pair in the lists covers a pair of tokens."""
    met = torch.zeros(len(mine.token_NC), len(others.token_NC), dtype=torch.int64)
    for tile, (row, count) in enumerate(zip(lists.tiles_NM, lists.count_N, strict=True)):
        met[tile].index_add_(0, row[:count].long(), torch.ones(int(count), dtype=torch.int64))
    return met


@either_side
@pytest.mark.parametrize(
    "lengths", [[700], [300, 21, 379], [1] * 130], ids=["one", "three", "ones"]
)
@pytest.mark.parametrize("window", [3, 300, 600])
def test_lists_hold_every_tile_pair_that_is_needed_once(window, lengths, window_side):
    T, order_T = sum(lengths), draw(lengths)
    plan = plan_windows(order_T, offsets(lengths), window=window, window_side=window_side)
    pairs_TT = attended_pairs(order_T, lengths, window=window, window_side=window_side)
    tile_T = torch.empty(T, dtype=torch.int64)
    tokens = plan.queries.token_NC
    for tile, token_C in enumerate(tokens):
        tile_T[token_C[token_C < T].long()] = tile
    needed = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    i, j = pairs_TT.nonzero(as_tuple=True)
    needed[tile_T[i], tile_T[j]] = True
    met = listed_pairs(plan.queries, plan.keys_of_queries, plan.keys)
    assert met.max() == 1
    assert met[needed].all()
    assert torch.equal(met, listed_pairs(plan.keys, plan.queries_of_keys, plan.queries).T)


@pytest.mark.parametrize(("window", "most"), [(1024, 0.85), (4096, 0.72)])
def test_sorted_segments_skip_tiles(window, most):
    """Against all tiles within the window of a tile of consecutive slots."""
    T = 32768
    plan = plan_windows(draw([T]), offsets([T]), window=window, window_side="two")
    consecutive = window / TILE + 1
    assert float(plan.keys_of_queries.count_N.double().mean()) <= most * consecutive


def test_keeps_nothing_that_grows_with_the_square():
    T, window = 2048, 32
    inputs = make_inputs(T, dtype=torch.float32)
    plan = plan_windows(draw([T]), offsets([T]), window=window, window_side="two")
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        o_THV = windowed_attention(*inputs, plan)
    row = 4 * (V + 1)  # the output and its log-sum-exp, with the row for empty slots
    assert sum(kept.values()) <= sum(x.nbytes for x in (*inputs, o_THV)) + 4 * 4 * (T + 1) + 4 * row
    tiles = (plan.queries, plan.keys_of_queries, plan.queries_of_keys)
    planned = sum(x.nbytes for part in tiles for x in vars(part).values() if torch.is_tensor(x))
    assert planned <= 4 * T * (4 + (7 + 2 * 5) / TILE)


@pytest.mark.parametrize("changed", range(len(PACKED)))
def test_no_document_leaks_into_another(changed):
    """Changing one document leaves the others' outputs and gradients equal to the bit."""
    inputs, order_T = make_inputs(sum(PACKED)), draw(PACKED)
    mixed = []
    for x in inputs:
        parts = list(x.detach().split(PACKED))
        parts[changed] = parts[changed] + 1
        mixed.append(torch.cat(parts).requires_grad_())
    options = {"window": 9, "window_side": "two"}
    before, after = (results(tiled, x, PACKED, order_T, **options) for x in (inputs, mixed))
    for name in before:
        pairs = zip(before[name].split(PACKED), after[name].split(PACKED), strict=True)
        for document, (x, y) in enumerate(pairs):
            assert torch.equal(x, y) or document == changed, (name, document)
    assert not torch.equal(before["o"], after["o"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: (q[:-1], k, v), "q_THK"),
        (lambda q, k, v: (q, k[1:], v[1:]), "k_SGK"),
        (lambda q, k, v: (q[:, :3], k, v), "k_SGK .* 3 a multiple"),
        (lambda q, k, v: (q, k, v[:, :1]), "v_SGV"),
        (lambda q, k, v: (q, k.float(), v), "k_SGK is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, said):
    plan = plan_windows(draw([65]), offsets([65]), window=4, window_side="two")
    with pytest.raises(ValueError, match=said):
        windowed_attention(*change(*make_inputs(65)), plan)


def test_windows_that_make_no_sense():
    with pytest.raises(ValueError, match="window is 0"):
        plan_windows(draw([9]), offsets([9]), window=0, window_side="two")
    with pytest.raises(ValueError, match="expected 'two' or 'one'"):
        plan_windows(draw([9]), offsets([9]), window=3, window_side="left")  # type: ignore[arg-type]


def test_two_sides_of_an_even_window_have_one_slot_more_before():
    assert [window_reach(w, "two") for w in (1, 2, 3, 4)] == [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert all(
        sum(b) - sum(a) == 1 for a, b in pairwise(window_reach(w, "two") for w in range(1, 9))
    )
