"""Windowed attention from its definition, with an explicit mask. Memory T^2."""

import torch
from torch import Tensor

from mixtron.kernels.windowed_attention.window import WindowSide, window_reach


def attended_pairs(
    order_T: Tensor, lengths: list[int], *, window: int, window_side: WindowSide
) -> Tensor:
    """[T, T] bool: whether token i (row) attends token j (arXiv 2604.00754, in our notation).

    j is in i's document, not after i, and its slot lies in the window around i's slot.
    """
    before, after = window_reach(window, window_side)
    token_T = torch.arange(len(order_T))
    slot_T = torch.empty_like(order_T)
    slot_T[order_T] = token_T
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance_TT = slot_T[None, :] - slot_T[:, None]
    return (
        (document_T[:, None] == document_T)
        & (token_T[None, :] <= token_T[:, None])
        & (distance_TT >= -before)
        & (distance_TT <= after)
    )


def windowed_attention_reference(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGV: Tensor,
    order_T: Tensor,
    lengths: list[int],
    *,
    window: int,
    window_side: WindowSide,
    scale: float,
) -> Tensor:
    """o_i = sum_j softmax_j(scale q_i . k_j) v_j over the tokens j that i attends. [T, H, V]."""
    groups = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THV = (x.repeat_interleave(groups, dim=1) for x in (k_TGK, v_TGV))
    allowed_TT = attended_pairs(order_T, lengths, window=window, window_side=window_side)
    logits_HTT = torch.einsum("thk,shk->hts", q_THK, k_THK) * scale
    weights_HTT = logits_HTT.masked_fill(~allowed_TT, float("-inf")).softmax(-1)
    return torch.einsum("hts,shv->thv", weights_HTT, v_THV)
