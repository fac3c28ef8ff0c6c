"""Attention to the keys of earlier segments, which travel a ring; nothing of them is kept."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mixtron.kernels.path_attention import (
    Segment,
    attend_past,
    attend_past_backward,
)
from mixtron.megatron_ext.context_parallel import gather, nothing_of
from mixtron.megatron_ext.mixers.path.segments import Segments


@dataclass
class Ring:
    """Who passes to whom, and whose keys are of which document."""

    segments: Segments
    hops: int
    """How far keys must travel."""
    document_ST: Tensor
    """[segments, T] of all tokens."""

    @property
    def group(self) -> dist.ProcessGroup:
        return self.segments.group

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

    def meetings(self, hop: int) -> list[tuple[int, int, int, int]]:
        """(place, segment) among this rank's and (place, segment) among those that are here after
        `hop` hops, of all pairs in which the first attends the second."""
        theirs = self.segments.of_rank[(self.group.rank() - hop) % self.group.size()]
        return [
            (i, mine, j, other)
            for i, mine in enumerate(self.segments.own)
            for j, other in enumerate(theirs)
            if other in self.segments.seen_by(mine)
        ]


def ring_of(segments: Segments) -> Ring:
    size = segments.group.size()
    owner = {s: rank for rank, own in enumerate(segments.of_rank) for s in own}
    hops = [(owner[s] - owner[other]) % size for s in owner for other in segments.seen_by(s)]
    return Ring(segments, max(hops, default=0), segments.document_of_tokens())


def attend_segments_before(
    q_NGRTK: Tensor, until_NGRT: Tensor | None, made: list[Segment], v_NTGV: Tensor, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Output [N, G, R, T, V] and log-sum-exp [N, G, R, T] over all earlier segments' keys.

    Args:
        q_NGRTK, until_NGRT: from `past_queries`, of this rank's N segments.
        made: these, from `path_segment`.
    """
    G, segments = v_NTGV.shape[2], ring.segments
    k_NGTK = torch.cat([segment.k_BTGK for segment in made]).transpose(1, 2)
    after_NGRT = offset_NSGR = carry_NSGKK = None
    if made[0].map_BGKK is not None:
        maps_SGKK = _in_order([segment.map_BGKK for segment in made], segments)
        carry_NSGKK = torch.stack(
            [_carries(maps_SGKK, segment, ring.document_ST) for segment in segments.own]
        )
    if made[0].gate_after_BTH is not None:
        after_NTH = torch.cat([segment.gate_after_BTH for segment in made])  # type: ignore[misc]
        after_NGRT = after_NTH.transpose(1, 2).unflatten(1, (G, -1))
        totals_SH = _in_order([segment.gate_total_BH for segment in made], segments)
        offset_NSH = torch.stack([_offsets(totals_SH, segment) for segment in segments.own])
        offset_NSGR = offset_NSH.unflatten(2, (G, -1))
    return _RingAttention.apply(  # type: ignore[return-value]
        ring,
        q_NGRTK,
        until_NGRT,
        k_NGTK,
        v_NTGV.transpose(1, 2),
        after_NGRT,
        carry_NSGKK,
        offset_NSGR,
    )


def _in_order(own: list[Tensor | None], segments: Segments) -> Tensor:
    """[segments, ...] of all ranks, of which each gives its own [1, ...]."""
    all_RN = gather(torch.cat(own), segments.group)  # type: ignore[arg-type]
    return torch.stack([all_RN[place] for place in segments.gathered_order()])


def _carries(map_SGKK: Tensor, segment: int, document_ST: Tensor) -> Tensor:
    """[s]: what carries segment s's keys from its end to this one's start; 0 for later ones, and
    behind maps of another document, which may hold anything."""
    nothing_SGKK = nothing_of(map_SGKK)
    # Begins another document than this segment: its map carries none of this one's keys.
    other_S = (document_ST[:, 0] != document_ST[segment, 0])[:, None, None, None]
    map_SGKK = map_SGKK.masked_fill(other_S, 0)
    carries = list(nothing_SGKK)
    for s in reversed(range(segment)):
        if s == segment - 1:
            carries[s] = nothing_SGKK[s] + torch.eye(map_SGKK.shape[-1], device=map_SGKK.device)
        else:
            carries[s] = carries[s + 1] @ map_SGKK[s + 1]
    return torch.stack(carries)


def _offsets(total_SH: Tensor, segment: int) -> Tensor:
    """[s]: the sum of the gates between segment s and this one; 0 for later ones."""
    offsets = list(nothing_of(total_SH))
    for s in reversed(range(segment - 1)):
        offsets[s] = offsets[s + 1] + total_SH[s + 1]
    return torch.stack(offsets)


class _RingAttention(torch.autograd.Function):
    """Keeps this rank's own keys and values alone; they travel the ring once more in backward,
    with their gradients, which return home from where they end."""

    @staticmethod
    def forward(ctx, ring, q, until, k, v, after, carry, offset):
        o = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full(q.shape[:-1], float("-inf"))
        packet = _packet(k, v, after)
        for hop in range(ring.hops + 1):
            packet = ring.passed(packet, 1) if hop else packet
            for i, mine, j, other in ring.meetings(hop):
                piece_o, piece_lse = attend_past(
                    *_queries(q, until, i),
                    *_carried(packet, carry, offset, i, j, other),
                    ring.document_ST[mine],
                    ring.document_ST[other],
                )
                total = torch.logaddexp(lse[i], piece_lse[0])
                finite = total.masked_fill(total == float("-inf"), 0)
                o[i] *= (lse[i] - finite).exp()[..., None]
                o[i] += piece_o[0] * (piece_lse[0] - finite).exp()[..., None]
                lse[i] = total
        ctx.ring = ring
        ctx.save_for_backward(q, until, k, v, after, carry, offset, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):  # type: ignore[override]
        q, until, k, v, after, carry, offset, o, lse = ctx.saved_tensors
        ring = ctx.ring
        delta = (do * o).sum(-1) - dlse
        dq = torch.zeros_like(q)
        duntil, dcarry, doffset = (
            None if x is None else torch.zeros_like(x) for x in (until, carry, offset)
        )
        packet = _packet(k, v, after)
        gradients = [torch.zeros_like(x, dtype=q.dtype) for x in packet]
        for hop in range(ring.hops + 1):
            if hop:
                packet, gradients = ring.passed(packet, 1), ring.passed(gradients, 1)
            for i, mine, j, other in ring.meetings(hop):
                found = attend_past_backward(
                    *_queries(q, until, i),
                    *_carried(packet, carry, offset, i, j, other),
                    ring.document_ST[mine],
                    ring.document_ST[other],
                    lse_BGRT=lse[i : i + 1],
                    delta_BGRT=delta[i : i + 1],
                    do_BGRTV=do[i : i + 1],
                )
                dq[i] += found.q_BGRTK[0]
                gradients[1][j] += found.v_BGPV[0]
                if dcarry is None:
                    gradients[0][j] += found.k_BGPK[0]
                else:
                    gradients[0][j] += found.k_BGPK[0] @ carry[i, other]
                    apart_T = ring.document_ST[other] != ring.document_ST[mine, 0]
                    k_GTK = packet[0][j].masked_fill(apart_T[:, None], 0)
                    dcarry[i, other] = found.k_BGPK[0].mT @ k_GTK
                if found.until_BGRT is not None and found.after_BGRP is not None:
                    assert duntil is not None
                    assert doffset is not None
                    duntil[i] += found.until_BGRT[0]
                    gradients[2][j] += found.after_BGRP[0]
                    doffset[i, other] = found.after_BGRP[0].sum(-1)
        dk, dv, *dafter = ring.passed(gradients, -ring.hops) if ring.hops else gradients
        dafter = dafter[0] if dafter else None
        return None, dq, duntil, dk, dv.to(v.dtype), dafter, dcarry, doffset


def _packet(k: Tensor, v: Tensor, after: Tensor | None) -> list[Tensor]:
    return [x.contiguous() for x in (k, v, after) if x is not None]


def _queries(q: Tensor, until: Tensor | None, i: int) -> tuple[Tensor, Tensor | None]:
    return q[i : i + 1], None if until is None else until[i : i + 1]


def _carried(
    packet: list[Tensor], carry: Tensor | None, offset: Tensor | None, i: int, j: int, other: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The j-th segment's keys and gates, as they stand at the start of this rank's i-th; values in
    the arithmetic's dtype."""
    k, v, *gates = (x[j : j + 1] for x in packet)
    k = k if carry is None else k @ carry[i, other].mT
    after = None if offset is None else gates[0] + offset[i, other][..., None]
    return k, v.to(k.dtype), after
