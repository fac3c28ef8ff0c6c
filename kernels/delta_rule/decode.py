"""One token of the delta rule: the recurrence as its definition, and the mixers' decode step."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.delta_rule.triton_decode import delta_rule_decode_triton
from mixtron.kernels.norms import unit_norm
from mixtron.kernels.triton_tools import Form, form_for

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


def delta_rule_decode(
    state_BJKV: Tensor,
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BJV: Tensor,
    decay_logit_BJ: Tensor | None,
    log_decay_rate_J: Tensor | None,
    dt_bias_J: Tensor | None,
    step_logit_BJ: Tensor,
    *,
    step_size: StepSize,
    normalize_keys: bool = False,
    eps: float = 1e-6,
    scale: float | None = None,
    backend: Form | None = None,
) -> Tensor:
    """`delta_rule_step` from what the projections give, and in place.

        q / |q|,   log_decay = -exp(log_decay_rate) softplus(decay_logit + dt_bias),
        eta = sigmoid(step_logit)

    Args:
        state_BJKV                   [B, J, K, V] fp32, contiguous; it becomes the new state.
        q_BHK, k_BHK, v_BJV          bf16, fp16 or fp32; q, and k by `normalize_keys`, is brought to
                                     length 1.
        decay_logit_BJ, step_logit_BJ   any dtype; no decay logit: the state is not forgotten.
        log_decay_rate_J, dt_bias_J  fp32, None without decay.
        backend                      torch or triton (one launch, and fp32 throughout); None: triton
                                     on a GPU, torch elsewhere.
    Returns:
        o_BJV in v's dtype. Its time does not depend on the context.
    Raises:
        ValueError: a dtype, device or layout that the form cannot take.
    """
    if scale is None:
        scale = 1 / math.sqrt(q_BHK.shape[-1])
    if form_for(q_BHK, backend) == "triton":
        return delta_rule_decode_triton(
            state_BJKV,
            q_BHK,
            k_BHK,
            v_BJV,
            decay_logit_BJ,
            log_decay_rate_J,
            dt_bias_J,
            step_logit_BJ,
            step_size=step_size,
            normalize_keys=normalize_keys,
            eps=eps,
            scale=scale,
        )
    log_decay_BJ = None
    if decay_logit_BJ is not None:
        assert log_decay_rate_J is not None
        assert dt_bias_J is not None
        dt_BJ = F.softplus(decay_logit_BJ.float() + dt_bias_J)
        log_decay_BJ = -log_decay_rate_J.exp() * dt_BJ
    o_BJV, new_BJKV = delta_rule_step(
        state_BJKV,
        unit_norm(q_BHK),
        unit_norm(k_BHK) if normalize_keys else k_BHK,
        v_BJV,
        log_decay_BJ,
        step_logit_BJ.float().sigmoid(),
        step_size=step_size,
        eps=eps,
        scale=scale,
    )
    state_BJKV.copy_(new_BJKV)
    return o_BJV


def _beta(k_BJK: Tensor, eta_BJ: Tensor, step_size: StepSize, eps: float) -> Tensor:
    norm2_BJ = k_BJK.square().sum(-1)
    match step_size:
        case "kaczmarz":
            return eta_BJ / (norm2_BJ + eps)
        case "longhorn":
            return eta_BJ / (1 + eta_BJ * norm2_BJ)
        case "learned":
            return eta_BJ
