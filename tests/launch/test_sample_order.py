import itertools

import numpy as np
import pytest

from mixtron.launch import sample_order
from mixtron.launch.sample_order import blend, document_runs, permuted

SIZES = [1, 2, 3, 4, 5, 16, 17, 40, 255, 256, 257, 4095, 4097, 20_000]


@pytest.mark.parametrize("n", SIZES)
def test_each_epoch_is_a_permutation(n):
    for seed, epoch in itertools.product((0, 1234, 2**64 - 1), (0, 1, 10**9)):
        order = permuted(seed, np.array(epoch), n, np.arange(n))
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(n))


def test_seeds_and_epochs_differ():
    k = np.arange(1000)
    orders = [permuted(seed, np.array(epoch), 1000, k) for seed in range(5) for epoch in range(5)]
    for a, b in itertools.combinations(orders, 2):
        assert np.count_nonzero(a == b) < 10  # 1 expected


def test_places_are_independent_of_what_is_asked_with_them():
    epochs, k = np.array([0, 3, 3, 7]), np.array([5, 0, 99, 41])
    together = permuted(1, epochs, 100, k)
    alone = [permuted(1, e, 100, i) for e, i in zip(epochs, k, strict=True)]
    assert together.tolist() == [int(x) for x in alone]


def test_huge_sizes_cost_nothing():
    n = 2**62 - 12_345
    values = permuted(7, np.array(0), n, n - 1 - np.arange(1000))
    assert len(np.unique(values)) == 1000
    assert values.min() >= 0
    assert values.max() < n
    assert abs(values.mean() / n - 0.5) < 0.05


@pytest.mark.parametrize("n", [5, 12, 40])
def test_orders_are_uniform(n):
    """Where a sample goes, and which two come first, over 8,000 epochs: chi-squared."""
    epochs = np.arange(8000)
    places = np.stack([permuted(3, epochs, n, np.array(k)) for k in range(n)])
    for k in range(n):
        counts = np.bincount(places[k], minlength=n)
        assert _chi_squared(counts) < _limit(n - 1)
    pairs = np.bincount(places[0] * n + places[1], minlength=n * n)
    possible = pairs[[i * n + j for i in range(n) for j in range(n) if i != j]]
    assert _chi_squared(possible) < _limit(n * (n - 1) - 1)


def test_neighbours_do_not_stay_neighbours():
    n = 10_000
    order = permuted(5, np.array(0), n, np.arange(n))
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() / (n / 3) - 1) < 0.05
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05


def _chi_squared(counts: np.ndarray) -> float:
    expected = counts.mean()
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(freedom: int) -> float:
    """Five standard deviations above the mean of chi-squared."""
    return freedom + 5 * np.sqrt(2 * freedom)


def _blend(weights, count: int) -> np.ndarray:
    weights = np.array(weights, dtype=float)
    return blend(weights / weights.sum(), np.zeros(len(weights), dtype=np.int64), count)


@pytest.mark.parametrize(
    "weights",
    [[1], [1, 1], [0.3, 0.7], [1e-9, 1], [5, 3, 2], [1, *[0.001] * 200], "random"],
)
def test_shares_hold_to_within_one_sample_at_any_time(weights):
    if weights == "random":
        # Shares of which taking the largest deficit misses one by 1.07 samples.
        weights = np.random.default_rng(64).pareto(0.6, 40) + 1e-3
    chosen = _blend(weights, 3000)
    shares = np.array(weights, dtype=float) / np.sum(weights)
    taken = np.cumsum(chosen[:, None] == np.arange(len(shares)), axis=0)
    ideal = shares * np.arange(1, 3001)[:, None]
    assert np.abs(taken - ideal).max() < 1


def test_a_blend_continues_where_it_stopped():
    weights = np.array([0.5, 0.3, 0.2])
    whole = blend(weights, np.zeros(3, dtype=np.int64), 500)
    taken = np.bincount(whole[:123], minlength=3)
    assert np.array_equal(blend(weights, taken, 377), whole[123:])


def test_document_runs_partition_the_documents(monkeypatch):
    cuts = [0.0, 0.25, 0.9, 1.0]
    chosen = [document_runs(5000, a, b) for a, b in itertools.pairwise(cuts)]
    numbers = [np.concatenate([np.arange(*run) for run in runs]) for runs in chosen]
    assert np.array_equal(np.sort(np.concatenate(numbers)), np.arange(5000))
    for found, width in zip(numbers, np.diff(cuts), strict=True):
        assert abs(len(found) - 5000 * width) < 5 * np.sqrt(5000 * width * (1 - width))
    monkeypatch.setattr(sample_order, "BLOCK", 7)
    for runs, (a, b) in zip(chosen, itertools.pairwise(cuts), strict=True):
        assert np.array_equal(document_runs(5000, a, b), runs)
        assert (runs[1:, 0] > runs[:-1, 1]).all()


def test_a_growing_corpus_keeps_its_documents_in_their_splits():
    small, large = document_runs(1000, 0, 0.3), document_runs(3000, 0, 0.3)
    inside = np.concatenate([np.arange(*run) for run in large])
    before = np.concatenate([np.arange(*run) for run in small])
    assert np.array_equal(inside[inside < 1000], before)


def test_everything_and_nothing():
    assert document_runs(10, 0.0, 1.0).tolist() == [[0, 10]]
    assert document_runs(10, 0.5, 0.5).shape == (0, 2)
