"""Which of the stream's segments each context rank attends for, so that all have equal work."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mixtron.kernels.path_attention import documents
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.mixers.path.config import own_segments, segments_back
from mixtron.megatron_ext.token_exchange import TokenExchange, exchange_segments


@dataclass(frozen=True)
class Segments:
    """Equal pieces of the stream, in its order."""

    of_rank: list[list[int]]
    """The segments of each context rank, ascending."""
    tokens: int
    """In a segment."""
    reach: int
    """How many segments back a document goes at most."""
    cu_seqlens: Tensor
    group: dist.ProcessGroup
    exchange: TokenExchange | None
    """To where tokens are attended for and back; None where they lie."""

    @property
    def own(self) -> list[int]:
        return self.of_rank[self.group.rank()]

    def seen_by(self, segment: int) -> range:
        """Segments before this one that hold keys of its documents."""
        return range(max(segment - self.reach, 0), segment)

    def documents_from(self, first: int, last: int) -> Tensor:
        """`cu_seqlens` within the segments first .. last."""
        inside = self.cu_seqlens - first * self.tokens
        return inside.clamp(0, (last + 1 - first) * self.tokens)

    def document_of_tokens(self) -> Tensor:
        """[segments, tokens] of the whole stream."""
        count = sum(map(len, self.of_rank))
        device = self.cu_seqlens.device
        return documents(self.cu_seqlens, count * self.tokens, 0, device).unflatten(0, (count, -1))

    def gathered_order(self) -> list[tuple[int, int]]:
        """By segment: its rank, and its place among that rank's."""
        places = {s: (r, i) for r, own in enumerate(self.of_rank) for i, s in enumerate(own)}
        return [places[segment] for segment in sorted(places)]

    def take(self, x_BTE: Tensor | None) -> list:
        """[1, T/cp, ...] of the local tokens to [1, tokens, ...] of each own segment."""
        if x_BTE is None:
            return [None for _ in self.own]
        if self.exchange is not None:
            x_BTE = self.exchange.to_slots(x_BTE[0])[None]
        return list(x_BTE.split(self.tokens, dim=1))

    def give_back(self, segments: list[Tensor]) -> Tensor:
        """The transpose of `take`."""
        x_BTE = torch.cat(segments, dim=1)
        return x_BTE if self.exchange is None else self.exchange.to_tokens(x_BTE[0])[None]


def segments_of(batch: Batch, group: dist.ProcessGroup) -> Segments:
    share = batch.position_ids.shape[0]
    of_rank = own_segments(share, batch.context_size, batch.max_seqlen)
    held, exchange = len(of_rank[0]), None
    tokens = share // held
    if held > 1:
        exchange = batch.once(
            "balanced segments",
            lambda: exchange_segments(of_rank, tokens, group, batch.cu_seqlens.device),
        )
    reach = segments_back(batch.max_seqlen, tokens)
    return Segments(of_rank, tokens, reach, batch.cu_seqlens, group, exchange)
