"""Strictly causal attention with its log-sum-exp on torch's FlashAttention kernels (bf16, fp16).

The kernels know causal attention that includes the token itself. So the queries move up one row:
row t holds the query of token t + 1, which may attend keys up to t. A document's last row then
holds the next document's first query; it is left out of everything.

The kernels take one width for q, k and v, a multiple of 8 up to 256: narrower ones are filled up
with zeros, which changes no score and no output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

MAX_WIDTH = 256


def forward(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THV: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As `blockwise.forward`: o [T, H, V] in v's dtype and z [T, H] fp32."""
    V = v_THV.shape[-1]
    q_THE, k_THE, v_THE = _padded(q_THE.roll(-1, 0)), _padded(k_THE), _padded(v_THV, q_THE)
    o_THE, z_HT = _causal_forward(q_THE, k_THE, v_THE, cu_seqlens, longest, scale)
    first_T = _first_tokens(cu_seqlens, q_THE.shape[0])
    o_THV = o_THE[..., :V].roll(1, 0).masked_fill(first_T[:, None, None], 0)
    return o_THV, z_HT.t().roll(1, 0).masked_fill(first_T[:, None], float("-inf"))


def backward(
    do_THV: Tensor,
    q_THE: Tensor,
    k_THE: Tensor,
    v_THV: Tensor,
    o_THV: Tensor,
    z_TH: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `blockwise.backward`, with the output in place of delta: the kernel takes <do, o>."""
    (T, _, E), V = q_THE.shape, v_THV.shape[-1]
    first_T = _first_tokens(cu_seqlens, T)
    # A weight exp(score - inf) is 0, for the rows that are left out.
    z_TH = z_TH.masked_fill(first_T[:, None], float("inf")).roll(-1, 0)
    dq_THE, dk_THE, dv_THE = _causal_backward(
        _padded(do_THV.masked_fill(first_T[:, None, None], 0).roll(-1, 0), q_THE),
        _padded(q_THE.roll(-1, 0)),
        _padded(k_THE),
        _padded(v_THV, q_THE),
        _padded(o_THV.roll(-1, 0), q_THE),
        z_TH.t().contiguous(),
        cu_seqlens,
        longest,
        scale,
    )
    return dq_THE[..., :E].roll(1, 0), dk_THE[..., :E], dv_THE[..., :V]


def _causal_forward(
    q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention with the token itself: output and log-sum-exp [H, T]."""
    return varlen_attn(  # type: ignore[return-value]
        q_THE,
        k_THE,
        v_THE,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(-1, 0),
    )


def _causal_backward(
    do_THE: Tensor,
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    o_THE: Tensor,
    z_HT: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel behind `varlen_attn`'s gradient, handed an output and log-sum-exp of ours."""
    dropout_seeds = torch.zeros(2, dtype=torch.uint64, device=q_THE.device)
    return torch.ops.aten._flash_attention_backward(
        do_THE,
        q_THE,
        k_THE,
        v_THE,
        o_THE,
        z_HT,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        0.0,
        True,
        dropout_seeds,
        torch.empty(0, device=q_THE.device),
        scale=scale,
        window_size_left=-1,
        window_size_right=0,
    )


def _padded(x_THE: Tensor, like: Tensor | None = None) -> Tensor:
    """Zeros up to the next multiple of 8 of its own width, or of another's."""
    width = -(-(x_THE if like is None else like).shape[-1] // 8) * 8
    return F.pad(x_THE, (0, width - x_THE.shape[-1])).contiguous()


def _first_tokens(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[T] bool: tokens that start a document."""
    starts = torch.zeros(tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    return starts.index_fill_(0, cu_seqlens.long(), True)[:tokens]
