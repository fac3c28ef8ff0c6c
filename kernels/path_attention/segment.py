"""A segment of tokens as later ones see it: its keys carried to its end, and its composed map."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mixtron.kernels.path_attention.blocks import (
    block_length,
    carries_to_end,
    key_blocks,
    same_document,
    split_groups,
    split_heads,
    sums_behind,
)


@dataclass
class Segment:
    """What a later segment needs of this one, beside its values; fp32 (fp64 for fp64 inputs)."""

    k_BTGK: Tensor
    """k_j carried by H_{j+1} .. H_T."""
    map_BGKK: Tensor | None
    """H_T ... H_1: carries the keys of the segments before on. None without Householder maps."""
    gate_after_BTH: Tensor | None
    """Sum of the log gates behind each key, j+1 .. T."""
    gate_total_BH: Tensor | None


def path_segment(
    k_BTGK: Tensor,
    w_BTGK: Tensor | None,
    beta_BTG: Tensor | None,
    log_forget_BTH: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Segment:
    """Arguments of `path_attention`; differentiable. Time and memory are linear in T.

    With maps, the keys of documents that end inside the segment are 0, and so is its map if there
    are any: nothing after reads them. The maps compose: behind segment 1 then 2 stands
    (map_2 k_1 and k_2, map_2 map_1).
    """
    tensors = checkpoint(
        _segment,
        k_BTGK,
        w_BTGK,
        beta_BTG,
        log_forget_BTH,
        cu_seqlens,
        block_length(k_BTGK, w_BTGK),
        use_reentrant=False,
        preserve_rng_state=False,
    )
    assert tensors is not None
    return Segment(*tensors)


@dataclass
class PastKeys:
    """Keys and values of the tokens before the first: every key is carried to the left edge of the
    first token, by the maps of all tokens between."""

    k_BPGK: Tensor
    """[B, P, G, K] fp32 or fp64."""
    v_BPGV: Tensor
    """[B, P, G, V] of v's dtype."""
    gate_after_BPH: Tensor | None = None
    """[B, P, H] sums of the log gates behind each key, fp32 or fp64; None without a gate."""


def past_of(segments: list[Segment], values: list[Tensor]) -> PastKeys:
    """What stands before the token after these segments, which follow one another.

    The maps behind a segment are composed first, so each of its keys is carried once.

    Args:
        values: [B, T, G, V] of each segment.
    """
    keys, gates = [], []
    carry_BGKK = total_BH = None
    for segment in reversed(segments):
        k_BTGK, gate_BTH = segment.k_BTGK, segment.gate_after_BTH
        if carry_BGKK is not None:
            k_BTGK = (k_BTGK.transpose(1, 2) @ carry_BGKK.mT).transpose(1, 2)
        if gate_BTH is not None and total_BH is not None:
            gate_BTH = gate_BTH + total_BH[:, None]
        keys.insert(0, k_BTGK)
        gates.insert(0, gate_BTH)
        carry_BGKK = _before(carry_BGKK, segment.map_BGKK, torch.matmul)
        total_BH = _before(total_BH, segment.gate_total_BH, torch.add)
    gate_after_BPH = None if gates[0] is None else torch.cat(gates, dim=1)
    return PastKeys(torch.cat(keys, dim=1), torch.cat(values, dim=1), gate_after_BPH)


def _before(behind: Tensor | None, own: Tensor | None, join) -> Tensor | None:
    return own if behind is None or own is None else join(behind, own)


def _segment(k_BTGK, w_BTGK, beta_BTG, log_forget_BTH, cu_seqlens, C):
    T, G = k_BTGK.shape[1:3]
    dtype = torch.promote_types(k_BTGK.dtype, torch.float32)
    k_BGNCK = split_groups(k_BTGK, C, dtype)
    w_BGNCK = beta_BGNC = log_forget_BGRNC = None
    if w_BTGK is not None:
        w_BGNCK = split_groups(w_BTGK, C, dtype)
        beta_BGNC = split_groups(beta_BTG[..., None], C, dtype).squeeze(-1)
    if log_forget_BTH is not None:
        log_forget_BGRNC = split_heads(log_forget_BTH[..., None], G, C, dtype).squeeze(-1)
    tokens = k_BGNCK.shape[2] * C
    document_S = documents(cu_seqlens, tokens, 0, k_BTGK.device)
    same_NCC = same_document(document_S, C)
    keys, _ = key_blocks(k_BGNCK, w_BGNCK, beta_BGNC, log_forget_BGRNC, same_NCC)
    map_BGKK = gate_after_BTH = gate_total_BH = None
    carried_BGNCK = keys.k_BGNCK
    if keys.map_BGNKK is not None:
        # A select: what is of a document that ends inside may be inf.
        ends_NC1 = (document_S != document_S[T - 1]).unflatten(0, (-1, C))[..., None]
        carries_BGNKK = carries_to_end(keys.map_BGNKK.masked_fill(ends_NC1[:, :1], 0))
        map_BGKK = carries_BGNKK[:, :, 0]
        carried_BGNCK = carried_BGNCK.masked_fill(ends_NC1, 0) @ carries_BGNKK[:, :, 1:].mT
    if keys.gate_after_BGRNC is not None:
        assert keys.gate_total_BGRN is not None
        after_BGRNC = keys.gate_after_BGRNC + sums_behind(keys.gate_total_BGRN)[..., None]
        gate_after_BTH = after_BGRNC.flatten(3).flatten(1, 2).transpose(1, 2)[:, :T]
        gate_total_BH = keys.gate_total_BGRN.sum(-1).flatten(1)
    return (
        carried_BGNCK.flatten(2, 3).transpose(1, 2)[:, :T],
        map_BGKK,
        gate_after_BTH,
        gate_total_BH,
    )


def documents(cu_seqlens: Tensor | None, tokens: int, before: int, device: torch.device) -> Tensor:
    """[before + tokens] int: each token's document; -1 for the `before` ones that fill up."""
    if cu_seqlens is None:
        document_S = torch.zeros(tokens, dtype=torch.int64, device=device)
    else:
        position_S = torch.arange(tokens, device=device)
        document_S = torch.searchsorted(cu_seqlens.long(), position_S, right=True)
    return F.pad(document_S, (before, 0), value=-1)
