"""Permutations that are pure functions of (seed, step, layer, document length).

No generator state: the bits are the same on every rank and device, in recomputation and after a
resume. Integer arithmetic on int64 tensors alone, whose products wrap alike everywhere.
"""

from typing import Literal

import torch
from torch import Tensor

from mixtron.kernels.windowed_attention import triton_plan

Backend = Literal["tiled", "triton"]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF


def philox_4x32(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011).

    Args:
        counter: four int64 tensors that broadcast, each below 2^32.
        key: two numbers below 2^32.
    Returns:
        Four words of 32 random bits each, int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product below 2^64 wraps to its own 64 bits; masks drop the sign that shifts drag in.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & LOW) ^ c1 ^ k0,
            p1 & LOW,
            ((p0 >> 32) & LOW) ^ c3 ^ k1,
            p0 & LOW,
        )
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & LOW, (k1 + KEY_INCREMENTS[1]) & LOW
    return [c0, c1, c2, c3]


def document_bounds(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """[T] int64 each: where every token's document starts and ends."""
    ends = cu_seqlens[1:].long()
    token_T = torch.arange(tokens, device=cu_seqlens.device)
    document_T = torch.searchsorted(ends, token_T, right=True)
    return cu_seqlens.long()[document_T], ends[document_T]


def document_permutation(
    cu_seqlens: Tensor,
    tokens: int,
    *,
    seed: int,
    step: int | Tensor,
    layer: int,
    backend: Backend = "tiled",
) -> Tensor:
    """A uniform permutation inside each document, independent between steps and layers.

    A document's depends on its length, not on where it lies or on what lies beside it.

    Args:
        cu_seqlens  [N+1] int32 or int64: where each document starts, and the end T; may be padded
                    by repeating T.
        tokens      T, on the host, so that nothing waits for the device.
        seed        below 2^64; step and layer below 2^32.
        backend     "tiled" in torch on any device, "triton" on a GPU: the same bits.
    Returns:
        order_T [T] int64: the token at each slot. Documents keep their places.
    """
    layers = range(layer, layer + 1)
    return document_permutations(
        cu_seqlens, tokens, seed=seed, step=step, layers=layers, backend=backend
    )[0]


def document_permutations(
    cu_seqlens: Tensor,
    tokens: int,
    *,
    seed: int,
    step: int | Tensor,
    layers: range,
    backend: Backend = "tiled",
) -> Tensor:
    """Those of several layers, [L, T] int64, in the time that one takes on a GPU. The step may be
    an int64 on the device, of no dimension.

    Its few sorts of some ten thousand numbers take as long as sorts of a million.
    """
    start_T, end_T = document_bounds(cu_seqlens, tokens)
    keys = triton_plan.random_keys if backend == "triton" else random_keys
    by_key_S = keys(start_T, end_T, seed, step, layers).flatten().argsort(stable=True)
    # Layers and documents keep their places. Half as many bits to sort by in int32.
    first_L1 = tokens * torch.arange(len(layers), device=start_T.device)[:, None]
    document_S = (first_L1 + start_T).flatten().int()
    by_document_S = by_key_S[document_S[by_key_S].argsort(stable=True)]
    return by_document_S.view(len(layers), tokens) - first_L1


def random_keys(
    start_T: Tensor, end_T: Tensor, seed: int, step: int | Tensor, layers: range
) -> Tensor:
    """[L, T] int64: what the tokens of a document are sorted by."""
    token_T = torch.arange(len(start_T), device=start_T.device)
    layer_L1 = torch.arange(layers.start, layers.stop, device=start_T.device)[:, None]
    counter = [token_T - start_T, end_T - start_T, torch.zeros_like(token_T) + step, layer_L1]
    low, high, *_ = philox_4x32(counter, (seed & LOW, (seed >> 32) & LOW))
    return (high << 32) | low


def permutation_hash(order_T: Tensor) -> Tensor:
    """int64 scalar on the same device: of the whole sequence of numbers, the same everywhere."""
    slot_T = torch.arange(len(order_T), device=order_T.device)
    low, high, *_ = philox_4x32(
        [order_T & LOW, slot_T, torch.zeros_like(slot_T), torch.zeros_like(slot_T)], (0, 0)
    )
    return ((high << 32) | low).sum()
