"""Log decay and step size of every token and value head, from what the projection gives."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.delta_rule.triton_gates import gates_triton
from mixtron.kernels.triton_tools import Form, form_for


def decay_and_step_size(
    decay_TBJ: Tensor,
    step_TBJ: Tensor,
    rate_J: Tensor,
    bias_J: Tensor,
    *,
    backend: Form | None = None,
) -> tuple[Tensor, Tensor]:
    """log_decay = -exp(rate) softplus(decay + bias), eta = sigmoid(step); both [B, T, J].

    Args:
        decay_TBJ, step_TBJ  [T, B, J]  bf16, fp16 or fp32 (torch's form also fp64), of strides of
                             their own; B = 1 for Triton's form.
        rate_J, bias_J       [J]        fp32 or fp64.
        backend              torch or triton; None: triton on a GPU, torch elsewhere.
    Returns:
        In rate's dtype. Triton's form is one kernel each way and keeps its arguments alone.
    Raises:
        ValueError: shapes or a dtype that the form cannot take.
    """
    if form_for(decay_TBJ, backend) == "triton":
        return gates_triton(decay_TBJ, step_TBJ, rate_J, bias_J)
    wide = torch.promote_types(decay_TBJ.dtype, torch.float32)
    dt_BTJ = F.softplus(decay_TBJ.transpose(0, 1).to(wide) + bias_J)
    return -rate_J.exp() * dt_BTJ, step_TBJ.transpose(0, 1).to(wide).sigmoid()
