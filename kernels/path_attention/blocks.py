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
class Transform:
    """With T = (I + diag(beta) striu(W W^T))^-1 diag(beta) over the rows W of a block,
    H_a ... H_b = I - W_ab^T T_ab W_ab for every range of rows (README.md)."""

    w_BGNCK: Tensor
    reads_BGNCC: Tensor
    """T^T tril(W K^T, -1): how much of w_b key j has lost when b is past."""
    rows_BGNCK: Tensor
    """T^T W."""


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


def join_heads(x_BGRNCE: Tensor, tokens: int) -> Tensor:
    """[B, G, R, N, C, E] back to [B, T, H, E]."""
    return x_BGRNCE.flatten(3, 4).flatten(1, 2).transpose(1, 2)[:, :tokens]


def split_groups(x_BTGE: Tensor, C: int, dtype: torch.dtype) -> Tensor:
    """[B, T, G, E] to [B, G, N, C, E]; zeros (beta 0: identity maps) fill the last block."""
    return split_heads(x_BTGE, x_BTGE.shape[2], C, dtype).squeeze(2).contiguous()


def same_document(document_S: Tensor, C: int) -> Tensor:
    """[N, C, C] bool of the pairs of each block."""
    document_NC = document_S.unflatten(0, (-1, C))
    return document_NC[:, :, None] == document_NC[:, None]


def key_blocks(
    k_BGNCK: Tensor,
    w_BGNCK: Tensor | None,
    beta_BGNC: Tensor | None,
    log_forget_BGRNC: Tensor | None,
    same_NCC: Tensor,
) -> tuple[KeyBlocks, Transform | None]:
    """Of all blocks at once; differentiated by autograd."""
    transform = map_BGNKK = after_BGRNC = total_BGRN = None
    carried_BGNCK = k_BGNCK
    if w_BGNCK is not None and beta_BGNC is not None:
        transform = _transform(k_BGNCK, w_BGNCK, beta_BGNC, same_NCC)
        carried_BGNCK = k_BGNCK - transform.reads_BGNCC.mT @ w_BGNCK
        identity_KK = torch.eye(w_BGNCK.shape[-1], dtype=w_BGNCK.dtype, device=w_BGNCK.device)
        map_BGNKK = identity_KK - w_BGNCK.mT @ transform.rows_BGNCK
    if log_forget_BGRNC is not None:
        after_BGRNC = sums_behind(log_forget_BGRNC)
        total_BGRN = log_forget_BGRNC.sum(-1)
    return KeyBlocks(carried_BGNCK, map_BGNKK, after_BGRNC, total_BGRN), transform


def query_blocks(
    q_BGRNCK: Tensor,
    k_BGNCK: Tensor,
    transform: Transform | None,
    log_forget_BGRNC: Tensor | None,
    same_NCC: Tensor,
) -> QueryBlocks:
    """Of all blocks at once, for scaled queries; differentiated by autograd."""
    logits_BGRNCC = q_BGRNCK @ k_BGNCK.mT.unsqueeze(2)
    if transform is not None:
        seen_BGRNCC = q_BGRNCK @ transform.w_BGNCK.mT.unsqueeze(2)
        seen_BGRNCC = seen_BGRNCC.masked_fill(~same_NCC.tril(), 0)
        logits_BGRNCC = logits_BGRNCC - seen_BGRNCC @ transform.reads_BGNCC.unsqueeze(2)
        q_BGRNCK = q_BGRNCK - seen_BGRNCC @ transform.rows_BGNCK.unsqueeze(2)
    until_BGRNC = None
    if log_forget_BGRNC is not None:
        logits_BGRNCC = logits_BGRNCC + _sums_between(log_forget_BGRNC)
        until_BGRNC = log_forget_BGRNC.cumsum(-1)
    return QueryBlocks(q_BGRNCK, until_BGRNC, logits_BGRNCC)


def _transform(k_BGNCK: Tensor, w_BGNCK: Tensor, beta_BGNC: Tensor, same_NCC: Tensor) -> Transform:
    """One triangular solve. Pairs of different documents are left out of W W^T and W K^T, so that
    no document's numbers enter another's."""
    later_NCC = ~same_NCC.tril(-1)
    # Rows are the later token b, columns the earlier a: (I + diag(beta) striu(W W^T))^T.
    lower_BGNCC = (w_BGNCK @ w_BGNCK.mT * beta_BGNC[..., None, :]).masked_fill(later_NCC, 0)
    behind_BGNCC = (w_BGNCK @ k_BGNCK.mT).masked_fill(later_NCC, 0)
    solved = torch.linalg.solve_triangular(
        lower_BGNCC, torch.cat([behind_BGNCC, w_BGNCK], dim=-1), upper=False, unitriangular=True
    )
    solved = beta_BGNC[..., None] * solved
    C = same_NCC.shape[-1]
    return Transform(w_BGNCK, solved[..., :C], solved[..., C:])


def sums_behind(x: Tensor) -> Tensor:
    """[..., i]: the sum of what is behind i along the last dimension, from the end on."""
    return F.pad(x[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


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
