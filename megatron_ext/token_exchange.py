"""Tokens to the context ranks that own their slots in another order, with halos, and back."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAllRows(torch.autograd.Function):
    """Rows to each rank in turn, as many as the counts say; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        rows = rows.contiguous()
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _AllToAllRows.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


@dataclass(frozen=True)
class TokenExchange:
    """How tokens travel from the stream, contiguous over context ranks, to the owners of slots."""

    token_R: Tensor
    """The local token of each row sent, by destination and there by slot."""
    sent: list[int]
    received: list[int]
    """Rows to and from each rank."""
    row_S: Tensor
    """For each slot of this rank's piece, the row in which its token arrives."""
    group: dist.ProcessGroup

    def to_slots(self, x_THE: Tensor) -> Tensor:
        """[T/cp, ...] of the local tokens to [S, ...] of the piece, in the order of arrival."""
        return _AllToAllRows.apply(x_THE[self.token_R], self.sent, self.received, self.group)  # type: ignore[return-value]

    def to_tokens(self, y_SHE: Tensor) -> Tensor:
        """Back to the local tokens; only where the pieces do not overlap."""
        arrived = _AllToAllRows.apply(y_SHE, self.received, self.sent, self.group)
        return arrived[self.token_R.argsort()]  # type: ignore[index]


def exchange_tokens(
    order_T: Tensor, order_on_host_T: Tensor, pieces: list[range], group: dist.ProcessGroup
) -> TokenExchange:
    """Plans it. Every rank knows the whole order, so only the tokens themselves are sent.

    Args:
        order_T: [T] int64, the token at each slot.
        order_on_host_T: the same in the host's memory, where the rows to each rank are counted:
            they are sizes of tensors, and reading them from the device would wait for it.
        pieces: the slots that each context rank needs; they may overlap.
    """
    size, rank = group.size(), group.rank()
    share = len(order_T) // size
    on_host = [order_on_host_T[piece.start : piece.stop] // share for piece in pieces]
    counts = [source.bincount(minlength=size).tolist() for source in on_host]
    sent = [counts[destination][rank] for destination in range(size)]
    sources = [order_T[piece.start : piece.stop] // share for piece in pieces]
    tokens = []
    for piece, source, count in zip(pieces, sources, sent, strict=True):
        mine_first = (source != rank).int().argsort(stable=True)[:count]
        tokens.append(order_T[piece.start : piece.stop][mine_first] - rank * share)
    row_S = sources[rank].argsort(stable=True).argsort()
    return TokenExchange(torch.cat(tokens), sent, counts[rank], row_S, group)


def exchange_segments(
    of_rank: list[list[int]], tokens: int, group: dist.ProcessGroup, device: torch.device
) -> TokenExchange:
    """Plans it for whole segments of the stream, which ranks hold in order. Nothing waits.

    Args:
        of_rank: the segments that each rank gets, ascending; as many as it holds.
        tokens: in a segment.
    """
    size, rank, held = group.size(), group.rank(), len(of_rank[0])
    owner = {segment: r for r, segments in enumerate(of_rank) for segment in segments}
    mine = sorted(range(held * rank, held * (rank + 1)), key=owner.__getitem__)
    starts_R = torch.tensor([(s - held * rank) * tokens for s in mine], device=device)
    token_R = (starts_R[:, None] + torch.arange(tokens, device=device)).flatten()
    sent = [tokens * sum(owner[s] == r for s in mine) for r in range(size)]
    received = [tokens * sum(s // held == r for s in of_rank[rank]) for r in range(size)]
    # They arrive by rank, so by segment.
    row_S = torch.arange(held * tokens, device=device)
    return TokenExchange(token_R, sent, received, row_S, group)


def slot_pieces(slots: int, ranks: int, before: int, after: int) -> list[range]:
    """Each rank's even share of the slots, widened by a halo inside the stream."""
    share = slots // ranks
    return [
        range(max(first - before, 0), min(first + share + after, slots))
        for first in range(0, slots, share)
    ]


def with_rows_before(x_THE: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Puts up to `rows` rows of the ranks before in front of this rank's, in order.

    From neighbours alone if they hold as many; the first ranks get what there is.
    """
    share, rank, size = x_THE.shape[0], group.rank(), group.size()

    def shared(source: int, destination: int) -> int:
        """How many of the source's last rows the destination takes."""
        between = (destination - source - 1) * share
        return min(max(rows - between, 0), share) if source < destination else 0

    sent = [shared(rank, destination) for destination in range(size)]
    received = [shared(source, rank) for source in range(size)]
    tails = torch.cat([x_THE[share - count :] for count in sent])
    halo = _AllToAllRows.apply(tails, sent, received, group)
    return torch.cat([halo, x_THE])  # type: ignore[list-item]
