"""One token of the delta rule: the recurrence as its definition, and the decode step."""

import math
from typing import Literal

import torch
from torch import Tensor

StepSize = Literal["kaczmarz", "learned", "longhorn"]


def delta_rule_step(
    state_BJKV: Tensor,
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BJV: Tensor,
    log_decay_BJ: Tensor | None,
    eta_BJ: Tensor,
    *,
    step_size: StepSize,
    eps: float = 1e-6,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Reads and writes the state once (arXiv 2605.08587); O(1) whatever the context.

        S~ = exp(log_decay) S,   S' = S~ + beta k (v - S~^T k)^T,   o = scale S'^T q

    Args: as in `delta_rule`, without the token dimension; the arithmetic is in the state's dtype.
    Returns:
        o_BJV in v's dtype and the new state_BJKV; the old state is left as it was.
    """
    dtype = state_BJKV.dtype
    if scale is None:
        scale = 1 / math.sqrt(q_BHK.shape[-1])
    groups = v_BJV.shape[1] // q_BHK.shape[1]
    q_BJK, k_BJK = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (q_BHK, k_BHK))
    if log_decay_BJ is not None:
        state_BJKV = state_BJKV * log_decay_BJ.to(dtype).exp()[..., None, None]
    error_BJV = v_BJV.to(dtype) - torch.einsum("bjkv,bjk->bjv", state_BJKV, k_BJK)
    beta_BJ = _beta(k_BJK, eta_BJ.to(dtype), step_size, eps)
    write_BJKV = (beta_BJ[..., None] * k_BJK)[..., :, None] * error_BJV[..., None, :]
    state_BJKV = state_BJKV + write_BJKV
    o_BJV = scale * torch.einsum("bjkv,bjk->bjv", state_BJKV, q_BJK)
    return o_BJV.to(v_BJV.dtype), state_BJKV


def _beta(k_BJK: Tensor, eta_BJ: Tensor, step_size: StepSize, eps: float) -> Tensor:
    norm2_BJ = k_BJK.square().sum(-1)
    match step_size:
        case "kaczmarz":
            return eta_BJ / (norm2_BJ + eps)
        case "longhorn":
            return eta_BJ / (1 + eta_BJ * norm2_BJ)
        case "learned":
            return eta_BJ
