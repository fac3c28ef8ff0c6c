"""Orders that are computed, not stored: a permutation for each epoch, a blend, a document split.

Every function is of its arguments alone, so no rank, worker or restart has to agree on anything.
"""

import numpy as np

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15
BLOCK = 1 << 20


def mix64(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that scatters its bits (the finalizer of SplitMix64, Steele 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(seed: int, epoch: np.ndarray, n: int, k: np.ndarray) -> np.ndarray:
    """The sample at place `k` of `epoch`, when each epoch visits all `n` samples in its own order.

    A Feistel network on the smallest even number of bits that holds n, walked until the value
    falls below n (Black and Rogaway, 2002): constant memory, any k at once.

    Args:
        seed: 0 <= seed < 2^64.
        epoch: integers, broadcast against `k`.
        n: number of samples, 0 < n <= 2^62.
        k: integers in [0, n).

    Returns:
        int64, the shape of `k` and `epoch` together.
    """
    epoch, k = np.broadcast_arrays(np.asarray(epoch), np.asarray(k))
    seeds = np.full(k.size, seed, dtype=np.uint64)
    keys = mix64(mix64(seeds + np.uint64(GOLDEN)) + epoch.ravel().astype(np.uint64))
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    values = _feistel(k.ravel().astype(np.uint64), keys, half)
    while len(outside := np.flatnonzero(values >= n)):
        values[outside] = _feistel(values[outside], keys[outside], half)
    return values.astype(np.int64).reshape(k.shape)


def _feistel(x: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for round_ in range(ROUNDS):
        round_keys = keys + np.uint64((round_ + 1) * GOLDEN % 2**64)
        left, right = right, left ^ (mix64(right ^ mix64(round_keys)) & mask)
    return (left << half) | right


def blend(weights: np.ndarray, taken: np.ndarray, count: int) -> np.ndarray:
    """Which sources give the next `count` samples of a blend.

    Of the sources that would not run ahead of their share by a whole sample, the one whose next
    sample falls due first (Balinski and Young's quota method, 1975): at any time every source has
    given its share to within one sample, whatever the number of sources. Taking the largest
    deficit instead does not keep that bound.

    Args:
        weights: float64 [sources], above 0, of sum 1.
        taken: int64 [sources], samples that each has given since the blend began.

    Returns:
        int64 [count], numbers of sources.
    """
    taken, total = taken.copy(), int(taken.sum())
    chosen = np.zeros(count, dtype=np.int64)
    if len(weights) == 1:
        return chosen
    for i in range(count):
        due = np.where(taken < weights * (total + i + 1), (taken + 1) / weights, np.inf)
        chosen[i] = due.argmin()
        taken[chosen[i]] += 1
    return chosen


def document_runs(documents: int, start: float, stop: float) -> np.ndarray:
    """The documents whose hash, as a fraction, lies in [start, stop), as runs of neighbours.

    Args:
        documents: how many there are; each is known by its number.

    Returns:
        int64 [runs, 2]: first document of each run, and the one after its last.
    """
    edges, inside = [], False
    for first in range(0, documents, BLOCK):
        numbers = np.arange(first, min(first + BLOCK, documents), dtype=np.uint64)
        fraction = (mix64(numbers + np.uint64(GOLDEN)) >> np.uint64(11)) * 2.0**-53
        chosen = (start <= fraction) & (fraction < stop)
        edges.append(first + np.flatnonzero(np.diff(chosen, prepend=inside)))
        inside = bool(chosen[-1])
    if inside:
        edges.append(np.array([documents]))
    return np.concatenate(edges).astype(np.int64).reshape(-1, 2)
