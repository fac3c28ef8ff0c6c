"""Log-linear attention from its definition, and as a recurrence: oracles of the chunked form."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mixtron.kernels.log_linear_attention.decode import log_linear_step
from mixtron.kernels.log_linear_attention.fenwick import bits, node_start
from mixtron.kernels.recurrence import to_value_heads


def log_linear_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    beta_BTJ: Tensor | None,
    lambda_BTJL: Tensor,
    *,
    scale: float | None = None,
    lengths: Sequence[int] | None = None,
    initial_states_BSJKV: Tensor | None = None,
    initial_position: int = 0,
) -> Tensor:
    """Arguments and result of `log_linear_attention`: each token weighs every earlier one, and
    every node before the first, by the lambda of its level. O(T^2); gradients by autograd.

    Arithmetic is fp64 for fp64 inputs, else fp32; only o is rounded to v's dtype.
    """
    J, dtype = v_BTJV.shape[2], torch.promote_types(q_BTHK.dtype, torch.float32)
    q_BTJK, k_BTJK = (to_value_heads(x.to(dtype), J) for x in (q_BTHK, k_BTHK))
    alpha_BTJ = log_decay_BTJ.to(dtype).exp()
    inputs = [q_BTJK, k_BTJK, v_BTJV.to(dtype), alpha_BTJ, lambda_BTJL.to(dtype)]
    if beta_BTJ is not None:
        inputs.append(beta_BTJ.to(dtype))
    lengths = list(lengths or [v_BTJV.shape[1]])
    outputs = []
    for n, document in enumerate(zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)):
        position, nodes = (initial_position if n == 0 else 0), {}
        if n == 0 and initial_states_BSJKV is not None:
            nodes = {b: initial_states_BSJKV[:, b].to(dtype) for b in bits(position)}
        outputs += _document(*document, position=position, nodes=nodes)
    if scale is None:
        scale = 1 / math.sqrt(q_BTHK.shape[-1])
    return (scale * torch.stack(outputs, dim=1)).to(v_BTJV.dtype)


def _document(
    q_BTJK: Tensor,
    k_BTJK: Tensor,
    v_BTJV: Tensor,
    alpha_BTJ: Tensor,
    lambda_BTJL: Tensor,
    beta_BTJ: Tensor | None = None,
    *,
    position: int,
    nodes: dict[int, Tensor],
) -> list[Tensor]:
    """o_BJV of each token. Token s writes w_s v_s^T; at token t, row s of `writes` is what the
    transitions A_t ... A_{s+1} have left of w_s, and each node is what they have left of it."""
    writes_BJSK = q_BTJK[:, :0].transpose(1, 2)
    first = {b: node_start(position, b) for b in nodes}
    outputs = []
    for t in range(q_BTJK.shape[1]):
        alpha_BJ11, q_BJK, k_BJK = alpha_BTJ[:, t, :, None, None], q_BTJK[:, t], k_BTJK[:, t]
        writes_BJSK = alpha_BJ11 * writes_BJSK
        nodes = {b: alpha_BJ11 * node_BJKV for b, node_BJKV in nodes.items()}
        own_BJ1K = k_BJK.unsqueeze(2)
        if beta_BTJ is not None:
            own_BJ1K = beta_BTJ[:, t, :, None, None] * own_BJ1K
            recalled_BJS1 = writes_BJSK @ k_BJK.unsqueeze(-1)
            writes_BJSK = writes_BJSK - recalled_BJS1 * own_BJ1K
            nodes = {b: x - own_BJ1K.mT @ (k_BJK.unsqueeze(2) @ x) for b, x in nodes.items()}
        writes_BJSK = torch.cat([writes_BJSK, own_BJ1K], dim=2)

        now, lambda_BJL = position + t, lambda_BTJL[:, t]
        levels = [(now ^ (position + s)).bit_length() for s in range(t + 1)]
        score_BJS = lambda_BJL[..., levels] * (writes_BJSK @ q_BJK.unsqueeze(-1)).squeeze(-1)
        o_BJV = torch.einsum("bjs,bsjv->bjv", score_BJS, v_BTJV[:, : t + 1])
        for b, node_BJKV in nodes.items():
            level = (now ^ first[b]).bit_length()
            read_BJV = (q_BJK.unsqueeze(2) @ node_BJKV).squeeze(2)
            o_BJV = o_BJV + lambda_BJL[..., level, None] * read_BJV
        outputs.append(o_BJV)
    return outputs


def log_linear_attention_recurrent(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTJV: Tensor,
    log_decay_BTJ: Tensor,
    beta_BTJ: Tensor | None,
    lambda_BTJL: Tensor,
    *,
    scale: float | None = None,
    lengths: Sequence[int] | None = None,
    initial_states_BSJKV: Tensor | None = None,
    initial_position: int = 0,
) -> Tensor:
    """Arguments and result of `log_linear_attention`, token by token with O(log T) states."""
    B, T, _, K = q_BTHK.shape
    J, V = v_BTJV.shape[2:]
    dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
    shape = (B, lambda_BTJL.shape[-1], J, K, V)
    empty_BSJKV = torch.zeros(shape, dtype=dtype, device=q_BTHK.device)
    inputs = (q_BTHK, k_BTHK, v_BTJV, log_decay_BTJ, beta_BTJ, lambda_BTJL)
    outputs, t = [], 0
    for n, length in enumerate(lengths or [T]):
        first, states_BSJKV = (initial_position if n == 0 else 0), empty_BSJKV
        if n == 0 and initial_states_BSJKV is not None:
            held = torch.tensor([first >> b & 1 for b in range(shape[1])], device=q_BTHK.device)
            states_BSJKV = initial_states_BSJKV.to(dtype) * held[:, None, None, None]
        for position in range(first, first + length):
            token = (None if x is None else x[:, t] for x in inputs)
            at_B = torch.full((B,), position, device=q_BTHK.device)
            o_BJV, states_BSJKV = log_linear_step(states_BSJKV, at_B, *token, scale=scale)  # type: ignore[arg-type]
            outputs.append(o_BJV)
            t += 1
    return torch.stack(outputs, dim=1)
