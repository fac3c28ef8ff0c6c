"""A segment's queries against keys of other segments, piece by piece in any order.

Carried to their segment's left edge, queries meet the keys that are carried there too without any
map between: plain attention, of which pieces are merged by their log-sum-exps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mixtron.kernels.path_attention.blocks import (
    PLAIN_BLOCK,
    block_length,
    key_blocks,
    query_blocks,
    same_document,
    split_groups,
    split_heads,
    suffix_products,
)
from mixtron.kernels.path_attention.segment import documents


@dataclass
class PastGradients:
    """Of `attend_past`; the gates' are None without a gate."""

    q_BGRTK: Tensor
    until_BGRT: Tensor | None
    k_BGPK: Tensor
    v_BGPV: Tensor
    after_BGRP: Tensor | None


def past_queries(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    w_BTGK: Tensor | None,
    beta_BTG: Tensor | None,
    log_forget_BTH: Tensor | None,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scaled queries carried to the segment's left edge, [B, G, R, T, K] fp32, and the sums of the
    gates on the way, [B, G, R, T]. Linear in T, differentiable. R query heads share a key head.
    With maps, queries of documents that begin inside, which attend nothing before, are 0."""
    return checkpoint(  # type: ignore[return-value]
        _past_queries,
        q_BTHK,
        k_BTGK,
        w_BTGK,
        beta_BTG,
        log_forget_BTH,
        scale,
        cu_seqlens,
        use_reentrant=False,
        preserve_rng_state=False,
    )


def _past_queries(q_BTHK, k_BTGK, w_BTGK, beta_BTG, log_forget_BTH, scale, cu_seqlens):
    T, G, C = q_BTHK.shape[1], k_BTGK.shape[2], block_length(k_BTGK, w_BTGK)
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    q_BGRNCK, until_BGRT = split_heads(q_BTHK, G, C, dtype) * scale, None
    if w_BTGK is not None:
        k_BGNCK, w_BGNCK = (split_groups(x, C, dtype) for x in (k_BTGK, w_BTGK))
        beta_BGNC = split_groups(beta_BTG[..., None], C, dtype).squeeze(-1)
        tokens = k_BGNCK.shape[2] * C
        document_S = documents(cu_seqlens, tokens, 0, q_BTHK.device)
        same_NCC = same_document(document_S, C)
        keys, transform = key_blocks(k_BGNCK, w_BGNCK, beta_BGNC, None, same_NCC)
        queries = query_blocks(q_BGRNCK, k_BGNCK, transform, None, same_NCC)
        assert keys.map_BGNKK is not None
        # A select: what is of a document that begins inside may be inf.
        begins_NC1 = (document_S != document_S[0]).unflatten(0, (-1, C))[..., None]
        map_BGNKK = keys.map_BGNKK.masked_fill(begins_NC1[:, -1:], 0)
        q_BGRNCK = queries.q_BGRNCK.masked_fill(begins_NC1, 0)
        # P_{n-1} ... P_0 of every block n is the transpose of P_0^T ... P_{n-1}^T.
        products_BGNKK = suffix_products(map_BGNKK[:, :, :-1].mT.flip(2)).flip(2).mT
        first_BGRCK = q_BGRNCK[:, :, :, :1]
        later_BGRNCK = q_BGRNCK[:, :, :, 1:] @ products_BGNKK.unsqueeze(2)
        q_BGRNCK = torch.cat([first_BGRCK, later_BGRNCK], dim=3)
    if log_forget_BTH is not None:
        gate_BHT = log_forget_BTH.to(dtype).transpose(1, 2)
        until_BGRT = gate_BHT.cumsum(-1).unflatten(1, (G, -1))
    return q_BGRNCK.flatten(3, 4)[:, :, :, :T], until_BGRT


def attend_past(
    q_BGRTK: Tensor,
    until_BGRT: Tensor | None,
    k_BGPK: Tensor,
    v_BGPV: Tensor,
    after_BGRP: Tensor | None,
    document_T: Tensor,
    document_P: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output [B, G, R, T, V] and log-sum-exp [B, G, R, T]; 0 and -inf where no key is of the
    query's document. Rows of logits exist for a block of queries at a time.

    All keys come before the queries, so these meet them in the first query's document alone. What
    is of others is selected away, not weighed with 0: it may hold inf or NaN.
    """
    apart_T1, apart_P1 = _apart(document_T, document_P)
    q_BGRTK, k_BGPK = q_BGRTK.masked_fill(apart_T1, 0), k_BGPK.masked_fill(apart_P1, 0)
    v_BGPV = v_BGPV.masked_fill(apart_P1, 0)
    outputs, sums = [], []
    for rows in _blocks(q_BGRTK.shape[3]):
        logits_BGRCP = _logits(
            q_BGRTK, until_BGRT, k_BGPK, after_BGRP, document_T, document_P, rows
        )
        lse_BGRC = logits_BGRCP.logsumexp(-1)
        weights_BGRCP = _weights(logits_BGRCP, lse_BGRC)
        outputs.append((weights_BGRCP.flatten(2, 3) @ v_BGPV).unflatten(2, lse_BGRC.shape[2:]))
        sums.append(lse_BGRC)
    return torch.cat(outputs, dim=3).masked_fill_(apart_T1, 0), torch.cat(sums, dim=3)


def attend_past_backward(
    q_BGRTK: Tensor,
    until_BGRT: Tensor | None,
    k_BGPK: Tensor,
    v_BGPV: Tensor,
    after_BGRP: Tensor | None,
    document_T: Tensor,
    document_P: Tensor,
    *,
    lse_BGRT: Tensor,
    delta_BGRT: Tensor,
    do_BGRTV: Tensor,
) -> PastGradients:
    """Gradients through one piece of keys: lse over all pieces, delta = rowsum(do o) - dlse."""
    apart_T1, apart_P1 = _apart(document_T, document_P)
    q_BGRTK, k_BGPK = q_BGRTK.masked_fill(apart_T1, 0), k_BGPK.masked_fill(apart_P1, 0)
    do_BGRTV, v_BGPV = do_BGRTV.masked_fill(apart_T1, 0), v_BGPV.masked_fill(apart_P1, 0)
    found = PastGradients(
        torch.zeros_like(q_BGRTK),
        None if until_BGRT is None else torch.zeros_like(until_BGRT),
        torch.zeros_like(k_BGPK),
        torch.zeros_like(v_BGPV),
        None if after_BGRP is None else torch.zeros_like(after_BGRP),
    )
    for rows in _blocks(q_BGRTK.shape[3]):
        logits_BGRCP = _logits(
            q_BGRTK, until_BGRT, k_BGPK, after_BGRP, document_T, document_P, rows
        )
        weights_BGRCP = _weights(logits_BGRCP, lse_BGRT[..., rows])
        do_BGMV = do_BGRTV[..., rows, :].flatten(2, 3)
        found.v_BGPV += weights_BGRCP.flatten(2, 3).mT @ do_BGMV
        dlogits_BGRCP = (do_BGMV @ v_BGPV.mT).view_as(weights_BGRCP)
        dlogits_BGRCP = dlogits_BGRCP.sub_(delta_BGRT[..., rows, None]).mul_(weights_BGRCP)
        dlogits_BGRCP.masked_fill_(apart_T1[rows] | apart_P1.t(), 0)
        dlogits_BGMP = dlogits_BGRCP.flatten(2, 3)
        dq_BGMK = dlogits_BGMP @ k_BGPK
        found.q_BGRTK[..., rows, :] = dq_BGMK.unflatten(2, dlogits_BGRCP.shape[2:4])
        found.k_BGPK += dlogits_BGMP.mT @ q_BGRTK[..., rows, :].flatten(2, 3)
        if found.until_BGRT is not None and found.after_BGRP is not None:
            found.until_BGRT[..., rows] = dlogits_BGRCP.sum(-1)
            found.after_BGRP += dlogits_BGRCP.sum(-2)
    found.q_BGRTK.masked_fill_(apart_T1, 0)
    for gradient in (found.k_BGPK, found.v_BGPV):
        gradient.masked_fill_(apart_P1, 0)
    return found


def _apart(document_T: Tensor, document_P: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 1] and [P, 1] bool: queries and keys that are not of the first query's document."""
    return tuple((x != document_T[0])[:, None] for x in (document_T, document_P))  # type: ignore


def _blocks(tokens: int) -> list[slice]:
    return [slice(i, min(i + PLAIN_BLOCK, tokens)) for i in range(0, tokens, PLAIN_BLOCK)]


def _logits(
    q_BGRTK: Tensor,
    until_BGRT: Tensor | None,
    k_BGPK: Tensor,
    after_BGRP: Tensor | None,
    document_T: Tensor,
    document_P: Tensor,
    rows: slice,
) -> Tensor:
    q_BGRCK = q_BGRTK[..., rows, :]
    logits_BGRCP = (q_BGRCK.flatten(2, 3) @ k_BGPK.mT).unflatten(2, q_BGRCK.shape[2:4])
    if until_BGRT is not None and after_BGRP is not None:
        logits_BGRCP += until_BGRT[..., rows, None] + after_BGRP[..., None, :]
    other_CP = document_T[rows, None] != document_P
    return logits_BGRCP.masked_fill_(other_CP, float("-inf"))


def _weights(logits_BGRCP: Tensor, lse_BGRC: Tensor) -> Tensor:
    """exp(logits - lse), 0 for a query that attends nothing."""
    finite_BGRC = lse_BGRC.masked_fill(lse_BGRC == float("-inf"), 0)
    return logits_BGRCP.sub_(finite_BGRC[..., None]).exp_()
