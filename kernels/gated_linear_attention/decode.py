"""One token of gated linear attention: the recurrence as its definition, and the decode step."""

import math

import torch
from torch import Tensor


def gated_linear_step(
    state_BJKV: Tensor,
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BJV: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Reads and writes the state once (arXiv 2312.06635, eq. 3); O(1) whatever the context.

        S' = exp(log_decay) S + k v^T,   o = scale S'^T q

    Args: as in `gated_linear_attention`, without the token dimension: log_decay is [B, J], or
        [B, H, K] for one a key channel. The arithmetic is in the state's dtype.
    Returns:
        o_BJV in v's dtype and the new state_BJKV; the old state is left as it was.
    """
    dtype = state_BJKV.dtype
    if scale is None:
        scale = 1 / math.sqrt(q_BHK.shape[-1])
    if log_decay.dim() == 2:
        log_decay = log_decay.unsqueeze(-1)
    J = v_BJV.shape[1]
    q_BJK, k_BJK, log_decay_BJE = (
        x.to(dtype).repeat_interleave(J // x.shape[1], dim=1) for x in (q_BHK, k_BHK, log_decay)
    )
    write_BJKV = k_BJK[..., :, None] * v_BJV.to(dtype)[..., None, :]
    state_BJKV = log_decay_BJE.exp().unsqueeze(-1) * state_BJKV + write_BJKV
    o_BJV = scale * torch.einsum("bjkv,bjk->bjv", state_BJKV, q_BJK)
    return o_BJV.to(v_BJV.dtype), state_BJKV
