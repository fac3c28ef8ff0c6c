"""S-D attention from its definition, with the [T, T] interaction. Memory T^2."""

import torch
from torch import Tensor


def interaction(q_THK: Tensor, k_THK: Tensor, d_TH: Tensor, *, scale: float) -> Tensor:
    """L = S - D over all positions, without a mask. [H, T, T] (arXiv 2605.18826).

        S_ij = scale (q_i . k_j - k_i . q_j),   D = diag(d)

    S is skew-symmetric to the last bit: S_ji is the same difference taken the other way round.
    """
    scores_HTT = scale * torch.einsum("thk,shk->hts", q_THK, k_THK)
    return scores_HTT - scores_HTT.mT - torch.diag_embed(d_TH.t().to(scores_HTT.dtype))


def sd_attention_reference(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, d_TH: Tensor, lengths: list[int], *, scale: float
) -> Tensor:
    """o_i = sum_j softmax_j(L_ij) v_j over j <= i in i's document. [T, H, V]; any float dtype."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = torch.arange(len(document))
    allowed = (document[:, None] == document) & (order[:, None] >= order)
    logits_HTT = interaction(q_THK, k_THK, d_TH, scale=scale)
    weights_HTT = logits_HTT.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hts,shv->thv", weights_HTT, v_THV)
