"""The loss from its definition, with all logits at once."""

import torch
from torch import Tensor


def linear_cross_entropy_reference(
    hidden_TD: Tensor, weight_VD: Tensor, label_T: Tensor, *, used: int
) -> Tensor:
    """log sum over v < used of exp(w_v . h_t) - w_label . h_t, [T] in fp32 or above."""
    logits_TV = hidden_TD @ weight_VD[:used].t()
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return logits_TV.logsumexp(-1) - logits_TV.gather(1, label_T[:, None]).squeeze(1)
