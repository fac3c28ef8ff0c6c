"""Linear attention from its definition, as attention whose weights are products of features."""

import torch
from torch import Tensor


def features(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1 (arXiv 2006.16236, eq. 7), always above 0.

    Written as exp(x) below 0, where elu(x) + 1 would lose what it keeps of small numbers.
    """
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear_attention_reference(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """o_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j), j <= i in i's document.

    [B, T, H, V] in any float dtype. Memory T^2.
    """
    order_T = torch.arange(q_BTHK.shape[1], device=q_BTHK.device)
    allowed_TT = order_T[:, None] >= order_T
    if cu_seqlens is not None:
        document_T = torch.searchsorted(cu_seqlens.to(order_T.dtype), order_T, right=True)
        allowed_TT = allowed_TT & (document_T[:, None] == document_T)
    weights_BHTT = torch.einsum("bthk,bshk->bhts", features(q_BTHK), features(k_BTHK)) * allowed_TT
    weights_BHTT = weights_BHTT / weights_BHTT.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshv->bthv", weights_BHTT, v_BTHV)
