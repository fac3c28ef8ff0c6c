"""One token of log-linear attention: the recurrence with O(log T) states, and the decode step."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def log_linear_step(
    states_BSJKV: Tensor,
    position_B: Tensor,
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BJV: Tensor,
    log_decay_BJ: Tensor,
    beta_BJ: Tensor | None,
    lambda_BJL: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Reads the token's buckets and counts on: states merge as the binary number's digits carry.

    Args:
        states_BSJKV: state b is that of the node of bit b of the position, zero where the bit is
            not set. S is at least (position + 1).bit_length(), so at most 1 + log2 of the tokens.
        position_B: tokens before this one, int64; each sequence has its own. Levels beyond L must
            not be reached: the caller, who knows the lengths, refuses them.
        The rest as in `log_linear_attention`, without the token dimension; the arithmetic is in
        the states' dtype.
    Returns:
        o_BJV in v's dtype and the new states; the old ones are left as they were.
    """
    dtype, S = states_BSJKV.dtype, states_BSJKV.shape[1]
    if scale is None:
        scale = 1 / math.sqrt(q_BHK.shape[-1])
    groups = v_BJV.shape[1] // q_BHK.shape[1]
    q_BJK, k_BJK = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (q_BHK, k_BHK))
    write_BJK = k_BJK
    states_BSJKV = states_BSJKV * log_decay_BJ.to(dtype).exp()[:, None, :, None, None]
    if beta_BJ is not None:
        write_BJK = beta_BJ.to(dtype).unsqueeze(-1) * k_BJK
        recalled_BSJV = torch.einsum("bsjkv,bjk->bsjv", states_BSJKV, k_BJK)
        states_BSJKV = states_BSJKV - write_BJK[:, None, ..., None] * recalled_BSJV.unsqueeze(-2)
    own_BJKV = write_BJK.unsqueeze(-1) * v_BJV.to(dtype).unsqueeze(-2)

    every_BSJKV = torch.cat([own_BJKV.unsqueeze(1), states_BSJKV], dim=1)
    lambda_BJL = lambda_BJL.to(dtype)[..., : S + 1]
    lambda_BJL = F.pad(lambda_BJL, (0, S + 1 - lambda_BJL.shape[-1]))
    read_BSJV = torch.einsum("bsjkv,bjk->bsjv", every_BSJKV, q_BJK)
    o_BJV = scale * torch.einsum("bsjv,bjs->bjv", read_BSJV, lambda_BJL)

    carry_B1 = ((position_B + 1) & -(position_B + 1)).unsqueeze(1)
    node_S = 1 << torch.arange(S, device=states_BSJKV.device)
    merged_BS, target_BS = (x.to(dtype) for x in (node_S < carry_B1, node_S == carry_B1))
    sum_BJKV = own_BJKV + torch.einsum("bsjkv,bs->bjkv", states_BSJKV, merged_BS)
    states_BSJKV = states_BSJKV * (1 - merged_BS)[..., None, None, None]
    states_BSJKV = states_BSJKV + target_BS[..., None, None, None] * sum_BJKV.unsqueeze(1)
    return o_BJV.to(v_BJV.dtype), states_BSJKV
