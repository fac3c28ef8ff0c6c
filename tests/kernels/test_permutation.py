"""Permutations: a pure function, uniform, the same everywhere; and how far they carry."""

import math
from itertools import permutations

import pytest
import torch

from mixtron.kernels.windowed_attention import (
    attended_pairs,
    document_permutation,
    document_permutations,
    permutation_hash,
)
from mixtron.kernels.windowed_attention.coverage import (
    expected_coverage,
    random_order,
    receptive_field,
)
from mixtron.kernels.windowed_attention.permutation import philox_4x32

GOLDEN = [0, 2, 6, 7, 1, 4, 9, 8, 5, 3, 10, 11, 14, 15, 12, 13]
GOLDEN_HASH = -1029340980150093429


def draw(lengths: list[int], seed=0, step: int | torch.Tensor = 1, layer=1) -> torch.Tensor:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return document_permutation(cu_seqlens, sum(lengths), seed=seed, step=step, layer=layer)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_its_authors_numbers(counter, key, expected):
    words = philox_4x32([torch.tensor([c]) for c in counter], key)
    assert tuple(int(w) for w in words) == expected


def test_numbers_are_those_of_every_machine_and_version():
    """A resumed run must go on with the permutations that it began with."""
    order_T = draw([10, 1, 5], seed=2**63 - 1, step=1000, layer=24)
    assert order_T.tolist() == GOLDEN
    on_device = torch.tensor(1000)
    assert draw([10, 1, 5], seed=2**63 - 1, step=on_device, layer=24).tolist() == GOLDEN
    assert int(permutation_hash(order_T)) == GOLDEN_HASH


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [64], [3, 500, 1, 20]], ids=str)
def test_permutes_each_document_in_its_place(lengths):
    order_T, first = draw(lengths), 0
    for length in lengths:
        inside = order_T[first : first + length]
        assert sorted(inside.tolist()) == list(range(first, first + length))
        first += length


def test_depends_on_nothing_but_seed_step_layer_and_length():
    alone = draw([50])
    state = torch.get_rng_state()
    torch.manual_seed(77)
    between = draw([7, 50, 3, 50])
    torch.rand(3)
    padded = document_permutation(torch.tensor([0, 50, 50, 50]), 50, seed=0, step=1, layer=1)
    assert torch.equal(alone, padded)
    assert torch.equal(alone, between[7:57] - 7)
    assert torch.equal(alone, between[60:] - 60)
    torch.manual_seed(77)
    draw([50])
    after = torch.rand(3)
    torch.manual_seed(77)
    assert torch.equal(torch.rand(3), after), "a draw moves the generator"
    torch.set_rng_state(state)


def test_layers_drawn_together_are_those_drawn_alone():
    cu_seqlens, options = torch.tensor([0, 7, 57, 60, 60]), {"seed": 3, "step": 9}
    together_LT = document_permutations(cu_seqlens, 60, layers=range(4, 9), **options)
    alone = [document_permutation(cu_seqlens, 60, layer=n, **options) for n in range(4, 9)]
    assert torch.equal(together_LT, torch.stack(alone))


def test_each_argument_changes_it():
    n = 1000
    orders = [
        draw([n]),
        draw([n], seed=1),
        draw([n], seed=2**40),
        draw([n], step=2),
        draw([n], layer=2),
        draw([n], step=2, layer=2),
        draw([n + 1])[draw([n + 1]) < n],
    ]
    assert len({int(permutation_hash(order_T)) for order_T in orders}) == len(orders)
    slots = torch.stack([order_T.argsort().double() for order_T in orders])
    correlation = torch.corrcoef(slots).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(n)
    fixed_points = [(slots[0] == other).sum() for other in slots[1:]]
    assert max(fixed_points) < 10


def chi_square(counts: torch.Tensor) -> float:
    """In standard deviations above what independent uniform draws give on average."""
    expected, cells = counts.double().mean(), counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - (cells - 1)) / math.sqrt(2 * (cells - 1)))


@pytest.mark.parametrize("vary", ["step", "layer", "seed"])
def test_all_permutations_are_equally_likely(vary):
    index = {p: i for i, p in enumerate(permutations(range(4)))}
    draws = [index[tuple(draw([4], **{vary: i}).tolist())] for i in range(2400)]
    assert chi_square(torch.bincount(torch.tensor(draws), minlength=24)) < 5


def test_every_token_comes_to_every_slot_equally_often():
    n, repeats = 16, 500
    # Many documents of one length get the same permutation, so each step draws one.
    orders = torch.stack([draw([n], step=step) for step in range(repeats)])
    counts = torch.zeros(n, n, dtype=torch.int64)
    for slot in range(n):
        counts[slot] = torch.bincount(orders[:, slot], minlength=n)
    assert chi_square(counts) < 5


def test_hash_sees_every_difference():
    order_T = draw([100])
    swapped = order_T.clone()
    swapped[[3, 4]] = order_T[[4, 3]]
    hashes = {int(permutation_hash(x)) for x in (order_T, swapped, order_T.roll(1), order_T[:-1])}
    assert len(hashes) == 4


N, W = 65_536, 256


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "window_side"), [(7, "two"), (8, "two"), (6, "one")])
def test_receptive_field_is_a_product_of_masks(window, window_side, causal):
    n, orders = 60, [random_order(60, layer) for layer in (1, 2, 3)]
    found = receptive_field(orders, 41, window=window, window_side=window_side, causal=causal)
    reached = torch.zeros(n, dtype=torch.bool)
    reached[41] = True
    for layer, order_T in enumerate(orders):
        pairs_TT = attended_pairs(order_T, [n], window=window, window_side=window_side)
        if not causal:  # the mask of the reversed order holds the later tokens
            back = attended_pairs(n - 1 - order_T, [n], window=window, window_side=window_side)
            pairs_TT = pairs_TT | back.flip(0, 1)
        reached = pairs_TT[reached].any(0)
        assert torch.equal(found[layer], reached)


@pytest.mark.parametrize(("n", "window"), [(4096, 16), (N, W), (N, 16), (4096, 64)])
def test_without_a_mask_a_random_window_covers_in_log_w_n_layers(n, window):
    """The theorem: w^l / n grows by w a layer, and one layer more fills the gaps."""
    layers = math.ceil(math.log(n) / math.log(window)) + 1
    orders = [random_order(n, layer) for layer in range(1, layers + 1)]
    field_LT = receptive_field(orders, n // 2, window=window, window_side="two", causal=False)
    coverage_L = field_LT.float().mean(1).tolist()
    assert coverage_L[-1] > 0.99
    assert coverage_L[-3] < 0.1 or layers < 4
    # Where only few windows are drawn they vary.
    assert coverage_L == pytest.approx(expected_coverage(n, window, layers), rel=0.15)


def test_at_65536_tokens_two_layers_cover_most_and_three_all():
    orders = [random_order(N, layer) for layer in (1, 2, 3)]
    field_LT = receptive_field(orders, N - 1, window=W, window_side="two", causal=False)
    one, two, three = field_LT.float().mean(1).tolist()
    assert one <= W / N
    assert two == pytest.approx(0.63, abs=0.03)
    assert three > 0.9999


def test_causal_coverage_is_slower_and_leaves_the_nearest():
    orders = [random_order(N, layer) for layer in range(1, 11)]
    options = {"window": W, "window_side": "two", "causal": True}
    field_LT = receptive_field(orders, N - 1, **options)
    coverage_L = field_LT.float().mean(1).tolist()
    assert coverage_L[1] == pytest.approx(0.36, abs=0.04)
    assert coverage_L[2] == pytest.approx(0.94, abs=0.03)
    near_T = field_LT[-1].flip(0).float()
    assert near_T[1:257].mean() < 0.35
    assert near_T[8192:].mean() > 0.999
    assert near_T[1:65].mean() < near_T[256:512].mean() < near_T[2048:4096].mean()
    both = receptive_field(orders[:3], N - 1, **options, plain_window=True)
    assert both[-1].float().mean() > 0.999, "SA+SWA covers near and far"


@pytest.mark.parametrize(("n", "window", "layers"), [(N, W, 10), (4096, 64, 65)])
def test_sliding_windows_need_n_over_w_layers(n, window, layers):
    plain = [torch.arange(n)] * layers
    field_LT = receptive_field(plain, n - 1, window=window, window_side="one", causal=True)
    expected = [min(n, layer * (window - 1) + 1) for layer in range(1, layers + 1)]
    assert field_LT.sum(1).tolist() == expected
    assert expected[-1] < n or layers >= n / window
