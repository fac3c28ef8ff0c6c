"""What happens inside a block of tokens: the UT transform and the gates' sums (README.md)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SHORTEST_BLOCK, LONGEST_BLOCK = 16, 128
PLAIN_BLOCK = 64
"""Without Householder maps."""


@dataclass
class KeyBlocks:
    """Keys carried to their block's right edge, and what carries them on. Linear in T.

    Without Householder maps `map_BGNKK` is None; without a gate the sums are.
    """

    k_BGNCK: Tensor
    map_BGNKK: Tensor | None
    """H_end ... H_start of the block: a key column k leaves it as map k, a query row q as q map."""
    gate_after_BGRNC: Tensor | None
    """Of the gates behind each key, to the block's right edge."""
    gate_total_BGRN: Tensor | None


@dataclass
class QueryBlocks:
    """Scaled queries carried to their block's left edge, and the logits inside each block."""

    q_BGRNCK: Tensor
    gate_until_BGRNC: Tensor | None
    """Of the gates from the block's left edge to each query, its own included."""
    logits_BGRNCC: Tensor
    """Gates included, not masked."""


def block_length(k_BTGK: Tensor, w_BTGK: Tensor | None) -> int:
    """Tokens in a block. Within one, a map of rank K is written with as many terms as there are
    tokens: with more than K of them the rounding error grows, with fewer the K x K maps weigh."""
    T, K = k_BTGK.shape[1], k_BTGK.shape[3]
    return min(T, PLAIN_BLOCK if w_BTGK is None else max(SHORTEST_BLOCK, min(K, LONGEST_BLOCK)))


def split_heads(x_BTHE: Tensor, groups: int, C: int, dtype: torch.dtype) -> Tensor:
    """[B, T, H, E] to [B, G, R, N, C, E]: query head g R + r is r of group g; zeros fill up."""
    x_BTHE = F.pad(x_BTHE, (0, 0, 0, 0, 0, -x_BTHE.shape[1] % C)).to(dtype)
    return x_BTHE.unflatten(2, (groups, -1)).unflatten(1, (-1, C)).permute(0, 3, 4, 1, 2, 5)


def split_groups(x_BTGE: Tensor, C: int, dtype: torch.dtype) -> Tensor:
    """[B, T, G, E] to [B, G, N, C, E]; zeros (beta 0: identity maps) fill the last block."""
    return split_heads(x_BTGE, x_BTGE.shape[2], C, dtype).squeeze(2).contiguous()


def same_document(document_S: Tensor, C: int) -> Tensor:
    """[N, C, C] bool of the pairs of each block."""
    document_NC = document_S.unflatten(0, (-1, C))
    return document_NC[:, :, None] == document_NC[:, None]


def block_terms(
    q_BGRNCK: Tensor | None,
    k_BGNCK: Tensor,
    w_BGNCK: Tensor | None,
    beta_BGNC: Tensor | None,
    log_forget_BGRNC: Tensor | None,
    same_NCC: Tensor,
) -> tuple[QueryBlocks | None, KeyBlocks]:
    """The terms of every block at once, differentiated by autograd. Queries are optional.

    With the rows w_1 .. w_C of a block, T = (I + diag(beta) striu(W W^T))^-1 diag(beta) gives
    H_a ... H_b = I - W_ab^T T_ab W_ab of every range of rows (README.md). Pairs of different
    documents are left out of W W^T, so that no document's numbers enter another's.
    """
    reads_BGNCC, carried_BGNCK, map_BGNKK = None, k_BGNCK, None
    if w_BGNCK is not None:
        assert beta_BGNC is not None
        wT_BGNKC = w_BGNCK.mT
        earlier_NCC = same_NCC.tril(-1)
        # Rows are the later token b, columns the earlier a: (I + striu(..))^T.
        lower_BGNCC = (w_BGNCK @ wT_BGNKC * beta_BGNC[..., None, :]).masked_fill(~earlier_NCC, 0)
        writes_BGNCC = (w_BGNCK @ k_BGNCK.mT).masked_fill(~earlier_NCC, 0)
        solved = torch.linalg.solve_triangular(
            lower_BGNCC,
            torch.cat([writes_BGNCC, w_BGNCK], dim=-1),
            upper=False,
            unitriangular=True,
        )
        solved = beta_BGNC[..., None] * solved
        C = same_NCC.shape[-1]
        reads_BGNCC, rows_BGNCK = solved[..., :C], solved[..., C:]
        carried_BGNCK = k_BGNCK - reads_BGNCC.mT @ w_BGNCK
        identity_KK = torch.eye(w_BGNCK.shape[-1], dtype=w_BGNCK.dtype, device=w_BGNCK.device)
        map_BGNKK = identity_KK - wT_BGNKC @ rows_BGNCK
    sums_BGRNCC = until_BGRNC = after_BGRNC = total_BGRN = None
    if log_forget_BGRNC is not None:
        sums_BGRNCC = _sums_between(log_forget_BGRNC)
        until_BGRNC = log_forget_BGRNC.cumsum(-1)
        after_BGRNC, total_BGRN = sums_BGRNCC[..., -1, :], until_BGRNC[..., -1]
    keys = KeyBlocks(carried_BGNCK, map_BGNKK, after_BGRNC, total_BGRN)
    if q_BGRNCK is None:
        return None, keys
    logits_BGRNCC = q_BGRNCK @ k_BGNCK.mT.unsqueeze(2)
    if w_BGNCK is not None:
        assert reads_BGNCC is not None
        until_NCC = same_NCC.tril()
        seen_BGRNCC = (q_BGRNCK @ w_BGNCK.mT.unsqueeze(2)).masked_fill(~until_NCC, 0)
        logits_BGRNCC = logits_BGRNCC - seen_BGRNCC @ reads_BGNCC.unsqueeze(2)
        q_BGRNCK = q_BGRNCK - seen_BGRNCC @ rows_BGNCK.unsqueeze(2)
    if sums_BGRNCC is not None:
        logits_BGRNCC = logits_BGRNCC + sums_BGRNCC
    return QueryBlocks(q_BGRNCK, until_BGRNC, logits_BGRNCC), keys


def _sums_between(log_forget_BGRNC: Tensor) -> Tensor:
    """[..., C, C]: sum over j < l <= i of log_forget_l. Each entry is a sum of its own, not a
    difference of two running sums, in which weak gates would drown beside strong ones."""
    C = log_forget_BGRNC.shape[-1]
    return log_forget_BGRNC[..., None].expand(*log_forget_BGRNC.shape, C).tril(-1).cumsum(-2)


def carries_to_end(map_BGNKK: Tensor) -> Tensor:
    """[N + 1]: what carries a key from each block's left edge past the last block; last, I."""
    identity_KK = torch.eye(map_BGNKK.shape[-1], dtype=map_BGNKK.dtype, device=map_BGNKK.device)
    identity_BG1KK = identity_KK.expand(*map_BGNKK.shape[:2], 1, -1, -1)
    return torch.cat([suffix_products(map_BGNKK), identity_BG1KK], dim=2)


def suffix_products(map_BGNKK: Tensor) -> Tensor:
    """[n] is map_{N-1} ... map_n: by neighbouring pairs, 2 N products in log2 N levels."""
    N = map_BGNKK.shape[2]
    if N <= 1:
        return map_BGNKK
    odd = N % 2
    first, second = map_BGNKK[:, :, odd::2], map_BGNKK[:, :, 1 + odd :: 2]
    even_BGNKK = suffix_products(second @ first)
    beyond_BGNKK = even_BGNKK[:, :, 1:] @ second[:, :, :-1]
    odd_BGNKK = torch.cat([beyond_BGNKK, second[:, :, -1:]], dim=2)
    products = torch.stack([even_BGNKK, odd_BGNKK], dim=3).flatten(2, 3)
    if odd:
        products = torch.cat([products[:, :, :1] @ map_BGNKK[:, :, :1], products], dim=2)
    return products
