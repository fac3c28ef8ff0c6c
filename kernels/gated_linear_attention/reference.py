"""Gated linear attention token by token: the oracle of the chunked form."""

import torch
from torch import Tensor

from mixtron.kernels.gated_linear_attention.decode import gated_linear_step


def gated_linear_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state_BJKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `gated_linear_attention`. Serial over T; gradients by autograd.

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
        o_BJV, state_BJKV = gated_linear_step(
            state_BJKV, q_BTHK[:, t], k_BTHK[:, t], v_BTJV[:, t], log_decay[:, t], scale=scale
        )
        outputs.append(o_BJV)
    return torch.stack(outputs, dim=1), state_BJKV
