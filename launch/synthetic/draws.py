"""Random numbers that are a function of (key, sample index) alone: no generator state.

Integer arithmetic throughout, so that the same key gives the same bytes on any machine.
"""

import hashlib
import json
import math
from decimal import Context, Decimal

import numpy as np

from mixtron.launch.sample_order import GOLDEN, mix64

WEIGHT_TOTAL = 1 << 31


def key_of(*parts: str | int) -> int:
    """A 64-bit key, another one for other parts."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little")


class Draws:
    """Draws for N samples at once; a sample's do not depend on which others are drawn with it.

    Each call is a new site: the n-th call gives a sample the same numbers whenever it is asked.

    Args:
        key: of `key_of`.
        indices_N: int64, the samples' numbers.
    """

    def __init__(self, key: int, indices_N: np.ndarray) -> None:
        seed = np.full(len(indices_N), key, dtype=np.uint64)
        self._rows_N = mix64(mix64(seed + np.uint64(GOLDEN)) + indices_N.astype(np.uint64))
        self._sites = 0

    def __len__(self) -> int:
        return len(self._rows_N)

    def bits(self, *shape: int) -> np.ndarray:
        """uint64 [N, *shape], uniform: a SplitMix64 stream a sample and site."""
        self._sites += 1
        site = np.uint64(self._sites * GOLDEN % 2**64)
        streams_N = mix64(self._rows_N + site)
        steps = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return mix64(streams_N[:, None] + steps).reshape(len(self), *shape)

    def uniform(self, *shape: int) -> np.ndarray:
        """float64 [N, *shape] in [0, 1), multiples of 2^-53."""
        return (self.bits(*shape) >> np.uint64(11)) * 2.0**-53

    def integers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """int64 [N, *shape] in [low, high)."""
        return low + self.below(np.uint64(high - low), *shape)

    def below(self, bound: np.ndarray | np.uint64, *shape: int) -> np.ndarray:
        """int64 [N, *shape] in [0, bound) with bounds up to 2^31, broadcast against the shape."""
        scaled = (self.bits(*shape) >> np.uint64(32)) * np.asarray(bound, dtype=np.uint64)
        return (scaled >> np.uint64(32)).astype(np.int64)

    def distinct(self, low: int, high: int, count: int) -> np.ndarray:
        """int64 [N, count]: different integers in [low, high), every order equally likely."""
        keys = self.bits(high - low)
        chosen = np.argpartition(keys, count - 1, axis=1)[:, :count]
        order = np.take_along_axis(keys, chosen, 1).argsort(1, kind="stable")
        return low + np.take_along_axis(chosen, order, 1)

    def weighted(self, weights_K: np.ndarray, *shape: int) -> np.ndarray:
        """int64 [N, *shape]: numbers in [0, K) with these integer weights of sum below 2^31."""
        ends_K = np.cumsum(weights_K)
        return np.searchsorted(ends_K, self.below(ends_K[-1], *shape), side="right")

    def weighted_distinct(self, weights_K: np.ndarray, count: int) -> np.ndarray:
        """int64 [N, count]: as `weighted`, one after the other, each number at most once."""
        left_NK = np.tile(weights_K, (len(self), 1))
        chosen = np.empty((len(self), count), dtype=np.int64)
        for i in range(count):
            ends_NK = np.cumsum(left_NK, axis=1)
            at = self.below(ends_NK[:, -1])
            chosen[:, i] = (ends_NK <= at[:, None]).sum(1)
            np.put_along_axis(left_NK, chosen[:, i : i + 1], 0, 1)
        return chosen


def power_law_weights(count: int, exponent: float) -> np.ndarray:
    """int64 [count] proportional to 1^e, 2^e, ..., of sum just below 2^31; none is 0.

    Decimal arithmetic: a C library's `pow` may differ in the last bit from machine to machine.
    """
    context = Context(prec=30)
    powers = [context.power(Decimal(i), Decimal(str(exponent))) for i in range(1, count + 1)]
    scale = context.divide(Decimal(WEIGHT_TOTAL - 2 * count), sum(powers, Decimal(0)))
    return np.array([max(1, int(context.multiply(p, scale))) for p in powers], dtype=np.int64)
