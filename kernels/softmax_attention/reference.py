"""Packed causal attention from its definition, with an explicit mask. Memory T^2."""

import torch
from torch import Tensor


def softmax_attention_reference(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    lengths: list[int],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """o_i = sum_j softmax_j(scale q_i . k_j) v_j over j <= i in i's document, i - j < window."""
    groups = q_THK.shape[1] // k_TGK.shape[1]
    k_THK, v_THK = (x.repeat_interleave(groups, dim=1) for x in (k_TGK, v_TGK))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(document))[:, None] - torch.arange(len(document))
    allowed = (document[:, None] == document) & (distance >= 0)
    if window is not None:
        allowed &= distance < window
    logits_HTT = torch.einsum("thk,shk->hts", q_THK, k_THK) * scale
    weights_HTT = logits_HTT.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hts,shk->thk", weights_HTT, v_THK)
