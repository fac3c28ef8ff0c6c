"""The delta rule token by token, in its raw form: the oracle of every other form."""

import torch
from torch import Tensor

from mixtron.kernels.delta_rule.decode import StepSize, delta_rule_step


def delta_rule_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor | None,
    eta_BTJ: Tensor,
    *,
    step_size: StepSize,
    eps: float = 1e-6,
    scale: float | None = None,
    initial_state_BJKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `delta_rule`. Serial over T; gradients by autograd.

    Arithmetic and state are fp64 for fp64 inputs, else fp32; only o is rounded to v's dtype.
    """
    B, T, _, K = q_BTHK.shape
    J, V = v_BTJV.shape[2:]
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    empty_BJKV = torch.zeros(B, J, K, V, dtype=dtype, device=q_BTHK.device)
    state_BJKV = empty_BJKV if initial_state_BJKV is None else initial_state_BJKV.to(dtype)
    resets = set() if cu_seqlens is None else set(cu_seqlens.tolist()) - {0}
    outputs = []
    for t in range(T):
        if t in resets:
            state_BJKV = empty_BJKV
        o_BJV, state_BJKV = delta_rule_step(
            state_BJKV,
            q_BTHK[:, t],
            k_BTHK[:, t],
            v_BTJV[:, t],
            None if log_decay_BTJ is None else log_decay_BTJ[:, t],
            eta_BTJ[:, t],
            step_size=step_size,
            eps=eps,
            scale=scale,
        )
        outputs.append(o_BJV)
    return torch.stack(outputs, dim=1), state_BJKV
