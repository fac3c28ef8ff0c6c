"""Attention to the keys of earlier context ranks, gathered from all of them."""

from dataclasses import replace

import torch
from torch import Tensor

from mixtron.kernels.path_attention import PastKeys, Segment, past_of, path_segment
from mixtron.megatron_ext.context_parallel import gather, nothing_of
from mixtron.megatron_ext.mixers.path.segments import Segments


def pasts_of_segments(
    inputs: list[tuple], segments: Segments
) -> tuple[list[PastKeys | None], list[Tensor]]:
    """What stands before each own segment (None before the first), and its own values.

    Every rank sends its segments' keys, carried to their ends, their composed maps and their gates
    in one fp32 message, their values in another. The values are returned because every rank's
    backward takes part in the exchange, also that of a rank that uses nothing of it.

    Args:
        inputs: q, k, v, w, beta, log_forget of each own segment.
    """
    made = [
        path_segment(k, w, beta, log_forget, cu_seqlens=segments.documents_from(segment, segment))
        for segment, (_, k, _, w, beta, log_forget) in zip(segments.own, inputs, strict=True)
    ]
    own_values = [v_BTGV for _, _, v_BTGV, *_ in inputs]
    gathered_RNE = gather(torch.stack([_flat(segment) for segment in made]), segments.group)
    values_RNTGV = gather(torch.cat(own_values), segments.group)
    order, document_ST = segments.gathered_order(), segments.document_of_tokens()
    pasts: list[PastKeys | None] = []
    for segment in segments.own:
        theirs, values = [], []
        for before in segments.seen_by(segment):
            place, other_T = order[before], document_ST[before] != document_ST[segment, 0]
            theirs.append(_without(_unflat(gathered_RNE[place], made[0]), other_T))
            values.append(_cleared(values_RNTGV[place][None], other_T))
        pasts.append(past_of(theirs, values) if theirs else None)
    rank = segments.group.rank()
    unused = nothing_of(gathered_RNE[rank].sum()) + nothing_of(values_RNTGV[rank].sum())
    return pasts, [v_BTGV + unused.to(v_BTGV.dtype) for v_BTGV in own_values]


def _without(segment: Segment, other_T: Tensor) -> Segment:
    """Nothing of the tokens of documents that a later segment does not go on with: they may hold
    inf or NaN. A map or sum that begins in one carries no keys of that segment's document."""
    return Segment(
        _cleared(segment.k_BTGK, other_T),
        None if segment.map_BGKK is None else segment.map_BGKK.masked_fill(other_T[0], 0),
        None if segment.gate_after_BTH is None else _cleared(segment.gate_after_BTH, other_T),
        None if segment.gate_total_BH is None else segment.gate_total_BH.masked_fill(other_T[0], 0),
    )


def _cleared(x_BTXX: Tensor, other_T: Tensor) -> Tensor:
    return x_BTXX.masked_fill(other_T.view(1, -1, *[1] * (x_BTXX.dim() - 2)), 0)


def _tensors(segment: Segment) -> dict[str, Tensor]:
    return {name: x for name, x in vars(segment).items() if x is not None}


def _flat(segment: Segment) -> Tensor:
    return torch.cat([x.flatten() for x in _tensors(segment).values()])


def _unflat(flat_E: Tensor, like: Segment) -> Segment:
    tensors = _tensors(like)
    parts = flat_E.split([x.numel() for x in tensors.values()])
    named = zip(tensors.items(), parts, strict=True)
    return replace(like, **{name: part.view_as(x) for (name, x), part in named})
