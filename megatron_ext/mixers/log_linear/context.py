"""What context ranks leave to those after them: the Fenwick states of a document that goes on.

A document's nodes straddle the borders of ranks. Each rank sums up its own tokens as the part that
they have in the nodes of its end, at most 2 + log2(tokens) of which are not older than its tokens;
and as the transition that older nodes pass. All of them lie inside nodes of any later position, so
whoever comes later merges what it gets into the nodes of its own start. Which nodes these are
follows from the documents' lengths, which every host knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.log_linear_attention import bits, continue_states
from mixtron.megatron_ext.context_parallel import gather, nothing_of


@dataclass(frozen=True)
class Share:
    """A context rank's tokens, as documents."""

    lengths: list[int]
    """Of the parts of documents that lie here; they sum to the rank's tokens."""
    position: int
    """Of the first token in its document."""
    goes_on: bool
    """Whether the last document goes on at the next rank."""

    @property
    def last_position(self) -> int:
        """Of the last document's first token here."""
        return self.position if len(self.lengths) == 1 else 0

    @property
    def own_nodes(self) -> list[int]:
        """Bits of the position after the last token whose nodes hold tokens of this share."""
        end = self.last_position + self.lengths[-1]
        return [b for b in bits(end) if end >> b << b > self.last_position]


def share_of(lengths: Sequence[int], rank: int, size: int) -> Share:
    """The tokens of one of `size` ranks of a stream of documents of these lengths."""
    tokens = sum(lengths) // size
    begin, end = rank * tokens, (rank + 1) * tokens
    inside, position, start, goes_on = [], 0, 0, False
    for length in lengths:
        stop = start + length
        if start < end and stop > begin:
            if start < begin:
                position = begin - start
            inside.append(min(stop, end) - max(start, begin))
            goes_on = stop > end
        start = stop
    return Share(inside, position, goes_on)


def states_before(
    segment_map: tuple[Tensor, Tensor], lengths: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """The states [B, S, J, K, V] that the ranks before this one leave to its first token.

    Args:
        segment_map: of this rank's tokens, by `log_linear_segment_map`.
        lengths: of the whole stream's documents.
    """
    transition_BJKE, own_BSJKV = segment_map
    rank, size = group.rank(), group.size()
    shares = [share_of(lengths, r, size) for r in range(size)]
    sent = [share.own_nodes if share.goes_on else [] for share in shares]
    # Everyone sends as much as the one that has the most to send, and at least one node.
    nodes_SBJKV = own_BSJKV.transpose(0, 1)
    nodes_MBJKV = torch.stack([nodes_SBJKV[b] for b in sent[rank]] or [nothing_of(nodes_SBJKV[0])])
    missing = max(1, *map(len, sent)) - len(nodes_MBJKV)
    nodes_MBJKV = F.pad(nodes_MBJKV, (0, 0) * 4 + (0, missing))
    gathered = gather(torch.cat([transition_BJKE.flatten(), nodes_MBJKV.flatten()]), group)

    states_BSJKV = torch.zeros_like(own_BSJKV)
    for share, nodes, received in zip(shares[:rank], sent, gathered, strict=False):
        transition, written = received.split([transition_BJKE.numel(), nodes_MBJKV.numel()])
        written_MBJKV = written.view_as(nodes_MBJKV)
        empty_BJKV = torch.zeros_like(written_MBJKV[0])
        by_bit = dict(zip(nodes, written_MBJKV, strict=False))
        own = [by_bit.get(b, empty_BJKV) for b in range(own_BSJKV.shape[1])]
        received_map = transition.view_as(transition_BJKE), torch.stack(own, dim=1)
        if len(share.lengths) == 1:
            states_BSJKV = continue_states(
                states_BSJKV, share.position, share.lengths[0], received_map
            )
        else:
            states_BSJKV = received_map[1]
    # Every rank's backward takes part in the exchange, also that of a rank that used nothing of it.
    return states_BSJKV + nothing_of(gathered[rank].sum())
