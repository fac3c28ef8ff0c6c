"""Attention to the keys of earlier context ranks, which travel a ring; nothing of them is kept."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mixtron.kernels.path_attention import (
    Segment,
    attend_past,
    attend_past_backward,
    documents,
)
from mixtron.megatron_ext.batch import Batch
from mixtron.megatron_ext.context_parallel import gather


@dataclass
class Ring:
    """Who passes to whom, and whose keys are of which document."""

    group: dist.ProcessGroup
    hops: int
    """How far a document reaches back: from rank r to r - hops."""
    document_RT: Tensor
    """[ranks, T] of all ranks' tokens."""

    def passed(self, tensors: list[Tensor], distance: int) -> list[Tensor]:
        """What the rank `distance` before this one has; every rank takes part."""
        size, rank = self.group.size(), self.group.rank()
        to, source = (
            dist.get_global_rank(self.group, (rank + step) % size) for step in (distance, -distance)
        )
        received = [torch.empty_like(x) for x in tensors]
        operations = [
            *(dist.P2POp(dist.isend, x.contiguous(), to, self.group) for x in tensors),
            *(dist.P2POp(dist.irecv, x, source, self.group) for x in received),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received


def ring_of(batch: Batch, group: dist.ProcessGroup) -> Ring:
    share, ranks = batch.position_ids.shape[0], group.size()
    document_S = documents(batch.cu_seqlens, share * ranks, 0, batch.cu_seqlens.device)
    # Rank r's first token and the last of rank r - h are (h - 1) share + 1 apart.
    hops = (batch.max_seqlen - 2) // share + 1 if batch.max_seqlen > 1 else 0
    return Ring(group, min(hops, ranks - 1), document_S.unflatten(0, (ranks, share)))


def attend_ranks_before(
    q_BGRTK: Tensor,
    until_BGRT: Tensor | None,
    segment: Segment,
    v_BTGV: Tensor,
    ring: Ring,
) -> tuple[Tensor, Tensor]:
    """Output [B, G, R, T, V] and log-sum-exp [B, G, R, T] over all earlier ranks' keys.

    Args:
        q_BGRTK, until_BGRT: from `past_queries`.
        segment: this rank's, from `path_segment`.
    """
    G = v_BTGV.shape[2]
    k_BGTK, v_BGTV = segment.k_BTGK.transpose(1, 2), v_BTGV.transpose(1, 2)
    after_BGRT = offset_NBGR = carry_NBGKK = None
    if segment.map_BGKK is not None:
        carry_NBGKK = _carries(gather(segment.map_BGKK, ring.group), ring.group.rank())
    if segment.gate_after_BTH is not None and segment.gate_total_BH is not None:
        after_BGRT = segment.gate_after_BTH.transpose(1, 2).unflatten(1, (G, -1))
        totals_NBH = gather(segment.gate_total_BH, ring.group)
        offset_NBGR = _offsets(totals_NBH, ring.group.rank()).unflatten(2, (G, -1))
    return _RingAttention.apply(  # type: ignore[return-value]
        ring, q_BGRTK, until_BGRT, k_BGTK, v_BGTV, after_BGRT, carry_NBGKK, offset_NBGR
    )


def _carries(map_NBGKK: Tensor, rank: int) -> Tensor:
    """[n]: what carries rank n's keys from its end to this rank's start; 0 for later ranks."""
    identity_BGKK = torch.eye(map_NBGKK.shape[-1], device=map_NBGKK.device) + 0 * map_NBGKK[0]
    carries = [0 * each for each in map_NBGKK]
    for n in reversed(range(rank)):
        carries[n] = identity_BGKK if n == rank - 1 else carries[n + 1] @ map_NBGKK[n + 1]
    return torch.stack(carries)


def _offsets(total_NBH: Tensor, rank: int) -> Tensor:
    """[n]: the sum of the gates between rank n and this one; 0 for later ranks."""
    offsets = [0 * each for each in total_NBH]
    for n in reversed(range(rank - 1)):
        offsets[n] = offsets[n + 1] + total_NBH[n + 1]
    return torch.stack(offsets)


class _RingAttention(torch.autograd.Function):
    """Keeps this rank's own keys and values alone; they travel the ring once more in backward,
    with their gradients, which return home from where they end."""

    @staticmethod
    def forward(ctx, ring, q, until, k, v, after, carry, offset):
        rank = ring.group.rank()
        o = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full(q.shape[:-1], float("-inf"))
        packet = _packet(k, v, after)
        for hop in range(1, ring.hops + 1):
            packet = ring.passed(packet, 1)
            source = rank - hop
            if source < 0:
                continue
            piece_o, piece_lse = attend_past(
                q, until, *_carried(packet, carry, offset, source), *_documents(ring, source)
            )
            total = torch.logaddexp(lse, piece_lse)
            finite = total.masked_fill(total == float("-inf"), 0)
            o = (
                o * (lse - finite).exp()[..., None]
                + piece_o * (piece_lse - finite).exp()[..., None]
            )
            lse = total
        ctx.ring = ring
        ctx.save_for_backward(q, until, k, v, after, carry, offset, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):  # type: ignore[override]
        q, until, k, v, after, carry, offset, o, lse = ctx.saved_tensors
        ring, rank = ctx.ring, ctx.ring.group.rank()
        delta = (do * o).sum(-1) - dlse
        dq = torch.zeros_like(q)
        duntil, dcarry, doffset = (
            None if x is None else torch.zeros_like(x) for x in (until, carry, offset)
        )
        packet = _packet(k, v, after)
        gradients = [torch.zeros_like(x, dtype=q.dtype) for x in packet]
        for hop in range(1, ring.hops + 1):
            packet, gradients = ring.passed(packet, 1), ring.passed(gradients, 1)
            source = rank - hop
            if source < 0:
                continue
            found = attend_past_backward(
                q,
                until,
                *_carried(packet, carry, offset, source),
                *_documents(ring, source),
                lse_BGRT=lse,
                delta_BGRT=delta,
                do_BGRTV=do,
            )
            dq += found.q_BGRTK
            gradients[1] += found.v_BGPV
            if dcarry is None:
                gradients[0] += found.k_BGPK
            else:
                gradients[0] += found.k_BGPK @ carry[source]
                dcarry[source] = found.k_BGPK.mT @ packet[0]
            if found.until_BGRT is not None and found.after_BGRP is not None:
                assert duntil is not None
                assert doffset is not None
                duntil += found.until_BGRT
                gradients[2] += found.after_BGRP
                doffset[source] = found.after_BGRP.sum(-1)
        dk, dv, *dafter = ring.passed(gradients, -ring.hops)
        dafter = dafter[0] if dafter else None
        return None, dq, duntil, dk, dv.to(v.dtype), dafter, dcarry, doffset


def _packet(k: Tensor, v: Tensor, after: Tensor | None) -> list[Tensor]:
    return [x.contiguous() for x in (k, v, after) if x is not None]


def _carried(
    packet: list[Tensor], carry: Tensor | None, offset: Tensor | None, source: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A rank's keys and gates carried to this one's start; values in the arithmetic's dtype."""
    k, v, *gates = packet
    k = k if carry is None else k @ carry[source].mT
    after = None if offset is None else gates[0] + offset[source][..., None]
    return k, v.to(k.dtype), after


def _documents(ring: Ring, source: int) -> tuple[Tensor, Tensor]:
    return ring.document_RT[ring.group.rank()], ring.document_RT[source]
