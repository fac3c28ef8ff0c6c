"""Linear attention on the gated linear op: no decay, and the normaliser as one more value channel.

W is V + 1: the values and a constant 1, whose weighted sum is the normaliser.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_segment_map,
    gated_linear_step,
)
from mixtron.kernels.linear_attention.reference import features
from mixtron.kernels.linear_attention.triton_op import weighted_sums
from mixtron.kernels.recurrence import check_documents, check_gate, check_inputs, check_rows

Backend = Literal["chunk", "triton"]

FLOOR = 1e-20
"""Of the normaliser: keeps 0/0 out where every feature of a query or of the keys underflows."""


def linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    initial_state_BHKW: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rows: int = 1,
    backend: Backend = "chunk",
) -> tuple[Tensor, Tensor]:
    """Causal linear attention (arXiv 2006.16236, eq. 9), chunkwise parallel.

        S_t = S_{t-1} + phi(k_t) v_t^T,   z_t = z_{t-1} + phi(k_t)
        o_t = S_t^T phi(q_t) / (z_t . phi(q_t)),   phi(x) = elu(x) + 1

    Args:
        q_BTHK, k_BTHK      [B, T, H, K]  fp64, fp32, bf16 or fp16; v has the same dtype.
        v_BTHV              [B, T, H, V]
        initial_state_BHKW  [B, H, K, V + 1]  [S | z] that the first document begins with; fp32 or
                            fp64; None is zero.
        cu_seqlens          [N+1] int32 or int64, with B = 1; padded by repeating T.
        rows                in how many parts of equal length, each beginning a document of
                            cu_seqlens, the "triton" form may run side by side.
        backend             "chunk" in torch on any device; "triton" for bf16 on a GPU with K and V
                            of 64 or 128.
    Returns:
        o [B, T, H, V] in v's dtype and [S | z] after the last token, fp32 (fp64 for fp64 inputs).
        Features, states and the division are fp32; in the triton form features are bf16.
    Raises:
        ValueError: an argument that does not fit.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(get_args(Backend))}")
    if backend == "triton":
        check_inputs(q_BTHK, k_BTHK, v_BTHV)
        if rows != 1:
            check_rows(rows, cu_seqlens, q_BTHK.shape[1])
        if initial_state_BHKW is not None:
            B, _, H, K = q_BTHK.shape
            shape = (B, H, K, v_BTHV.shape[-1] + 1)
            check_gate("initial_state_BHKW", initial_state_BHKW, [shape], q_BTHK)
        if cu_seqlens is not None:
            check_documents(cu_seqlens, q_BTHK)
        phi_q_BTHK, phi_k_BTHK = (_Features.apply(x, x.dtype) for x in (q_BTHK, k_BTHK))
        o_BTHW, state_BHKW = weighted_sums(
            phi_q_BTHK, phi_k_BTHK, v_BTHV, initial_state_BHKW, cu_seqlens, rows
        )
        return _normalised(o_BTHW).to(v_BTHV.dtype), state_BHKW
    phi_q_BTHK, *writes = _features_of(q_BTHK, k_BTHK, v_BTHV)
    o_BTHW, state_BHKW = gated_linear_attention(
        phi_q_BTHK,
        *writes,
        scale=1.0,
        initial_state_BJKV=initial_state_BHKW,
        cu_seqlens=cu_seqlens,
    )
    return _normalised(o_BTHW).to(v_BTHV.dtype), state_BHKW


def linear_attention_segment_map(
    k_BTHK: Tensor, v_BTHV: Tensor, *, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a stretch of tokens does to the state before it: S_after = keep * S_before + h.

    keep [B, H, K, 1] is 1, or 0 where a document starts in between; h is [B, H, K, V + 1].
    """
    _, *writes = _features_of(k_BTHK, k_BTHK, v_BTHV)
    return gated_linear_segment_map(*writes, cu_seqlens=cu_seqlens)


def linear_attention_step(
    state_BHKW: Tensor, q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor
) -> tuple[Tensor, Tensor]:
    """The next token of each sequence: o [B, H, V] in v's dtype, and the new state. O(1)."""
    tokens = (x[:, None] for x in (q_BHK, k_BHK, v_BHV))
    inputs = (x[:, 0] for x in _features_of(*tokens))
    o_BHW, state_BHKW = gated_linear_step(state_BHKW, *inputs, scale=1.0)
    return _normalised(o_BHW).to(v_BHV.dtype), state_BHKW


def _features_of(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor) -> tuple[Tensor, ...]:
    """phi(q), phi(k), [v | 1] in fp32 (fp64), and no decay: what the gated op takes."""
    dtype = torch.promote_types(v_BTHV.dtype, torch.float32)
    no_decay_BTH = torch.zeros(v_BTHV.shape[:3], dtype=dtype, device=v_BTHV.device)
    v_BTHW = F.pad(v_BTHV.to(dtype), (0, 1), value=1.0)
    phi_q_BTHK, phi_k_BTHK = (_Features.apply(x, dtype) for x in (q_BTHK, k_BTHK))
    return phi_q_BTHK, phi_k_BTHK, v_BTHW, no_decay_BTH  # type: ignore[return-value]


class _Features(torch.autograd.Function):
    """phi in dtype, differentiated from its own value: phi'(x) = min(phi(x), 1). Keeps nothing
    else."""

    @staticmethod
    def forward(ctx, x, dtype):
        phi = features(x.to(torch.promote_types(x.dtype, torch.float32))).to(dtype)
        ctx.save_for_backward(phi)
        ctx.dtype = x.dtype
        return phi

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (phi,) = ctx.saved_tensors
        return (grad * phi.clamp(max=1)).to(ctx.dtype), None


def _normalised(o_W: Tensor) -> Tensor:
    """[..., V]: values over the last channel, the sum of the weights."""
    return o_W[..., :-1] / o_W[..., -1:].clamp_min(FLOOR)
