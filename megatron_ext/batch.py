"""The one object that tells every layer about the micro-batch it is working on."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mixtron.megatron_ext.cache import Cache
from mixtron.megatron_ext.scalars import Scalars

EVALUATION_STEP = 0
"""The step of every batch that is not trained on: evaluation and decoding always draw the same."""


MAX_ROWS = 64


@dataclass(kw_only=True, eq=False)
class Batch(PackedSeqParams):
    """A micro-batch flattened to one stream of T tokens, so packed and unpacked are one case.

    Carried as Megatron's `packed_seq_params` to every layer of every pipeline stage. Under context
    parallelism each rank works on T/cp consecutive tokens of the stream (the one layout there is),
    while `cu_seqlens` and `lengths` describe the whole stream.
    """

    cu_seqlens: Tensor
    """[N+1] int32 on the device: where each document starts, padded by repeating T."""
    lengths: list[int]
    """The documents' lengths on the host, without padding. They sum to T."""
    max_seqlen: int
    """No document is longer; one of this length there need not be."""
    position_ids: Tensor
    """[T/cp] int64: each local token's position in its document."""
    step: int
    """The optimizer step, for mixers that draw something anew at each; see EVALUATION_STEP. On the
    device, in an int64 tensor, where layers are recorded (layer_graphs.py)."""
    sequences: int | None = None
    """In how many rows of one length the stream falls, if that is known; each begins a document."""
    context_rank: int = 0
    context_size: int = 1
    cache: Cache | None = None
    """Decoding: filled by a stream of whole sequences, or advanced by one of a token each."""
    decoding: bool = False
    """The stream holds the next token of each of the cache's sequences."""
    _shared: dict = field(default_factory=dict)
    scalars: Scalars | None = None
    """Where layers report what is logged of this step; None when nothing is."""
    received: dict = field(default_factory=dict)
    """What layers that are computed again in backward took from other context ranks, by its taker
    (state_relay.py)."""
    token_kinds: dict[str, Tensor] = field(default_factory=dict)
    """[T/cp] bool each: kinds of tokens that reports tell apart."""

    @property
    def local_cu_seqlens(self) -> Tensor:
        """`cu_seqlens` within this rank's tokens: from 0, although a document may have begun
        before, to T/cp, although one may go on after."""
        share = self.position_ids.shape[0]
        if self.context_size == 1:
            return self.cu_seqlens
        first = self.context_rank * share
        return self.once("local_cu_seqlens", lambda: (self.cu_seqlens - first).clamp(0, share))

    @property
    def rows(self) -> int:
        """In how many parts of one length the stream falls that each begin a document, as the
        sequences of a micro-batch do: recurrences may run through them side by side. Context ranks
        have one each."""
        if self.context_size == 1 and self.sequences is not None:
            return self.sequences

        def count() -> int:
            total, starts = sum(self.lengths), {0, *accumulate(self.lengths)}
            fitting = (n for n in range(MAX_ROWS, 0, -1) if total % n == 0)
            return next(n for n in fitting if starts.issuperset(range(0, total, total // n)))

        return self.once("rows", count) if self.context_size == 1 else 1

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, computed by the first layer of the micro-batch that asks for it."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    def rope(self, base: float, dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin [T/cp, dim/2] fp32 of the local tokens, computed once a micro-batch."""

        def compute() -> tuple[Tensor, Tensor]:
            device = self.position_ids.device
            frequency = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
            angle = self.position_ids[:, None].float() * frequency
            return angle.cos(), angle.sin()

        return self.once(("rope", base, dim), compute)


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """x from the host on the device, behind what was launched before. The host waits for none of
    it, as it would from memory that is not pinned."""
    if torch.device(device).type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def make_batch(
    lengths: list[int],
    *,
    step: int,
    device: torch.device | str,
    sequences: int | None = None,
    context_rank: int = 0,
    context_size: int = 1,
) -> Batch:
    """Describes a stream of documents of these lengths; this rank holds its share of the tokens.

    Raises:
        ValueError: a length below 1, or a stream that `context_size` does not divide.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"document lengths must be at least 1, found {lengths}")
    starts = torch.tensor([0, *accumulate(lengths)])
    total = int(starts[-1])
    if total % context_size:
        raise ValueError(f"{total} tokens cannot be split over {context_size} context ranks")
    # By numpy: torch's repeat_interleave takes milliseconds, in which the GPU waits for the step.
    positions = torch.from_numpy(np.arange(total) - np.repeat(starts[:-1].numpy(), lengths))
    share = total // context_size
    local = positions[context_rank * share : (context_rank + 1) * share]
    # Few distinct sizes, so that shape-specialised kernels are compiled only a few times.
    capacity = max(64, 1 << len(lengths).bit_length())
    padded = torch.full((capacity,), total, dtype=torch.int32)
    padded[: len(starts)] = starts.to(torch.int32)
    return Batch(
        qkv_format="thd",
        cu_seqlens=sent(padded, device),
        lengths=list(lengths),
        max_seqlen=max(lengths),
        position_ids=sent(local, device),
        step=step,
        sequences=sequences,
        context_rank=context_rank,
        context_size=context_size,
    )


def prefill_batch(lengths: list[int], device: torch.device | str) -> Batch:
    """A stream of whole sequences of these lengths, which fills a new cache."""
    batch = make_batch(lengths, step=EVALUATION_STEP, device=device)
    batch.cache = Cache(torch.tensor(lengths, device=device))
    return batch


def decode_batch(cache: Cache) -> Batch:
    """A stream of the next token of each of the cache's sequences.

    The caller adds one to `cache.lengths` after the forward pass.
    """
    count = len(cache.lengths)
    batch = make_batch([1] * count, step=EVALUATION_STEP, device=cache.lengths.device)
    batch.position_ids = cache.lengths.clone()
    batch.cache, batch.decoding = cache, True
    return batch
