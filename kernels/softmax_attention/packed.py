"""Packed causal attention through torch's own kernels; nothing of size T^2 is kept."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


def softmax_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    lengths: list[int],
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal softmax attention inside each document.

    Args:
        q_THK       [T, H, K]  H query heads, a multiple of G.
        k_TGK       [T, G, K]  query head h reads key/value head h // (H/G).
        v_TGK       [T, G, K]
        lengths     the documents' lengths on the host; they sum to T.
        cu_seqlens  [N+1] int32 on the device, may be padded by repeating T.
        window      a token attends this many tokens, itself included; None is all.
    Returns:
        [T, H, K] in q's dtype. On a GPU in bf16 and fp16 by FlashAttention over all documents at
        once; otherwise by scaled_dot_product_attention, document by document.
    Raises:
        ValueError: shapes that do not fit.
    """
    if q_THK.shape[0] != sum(lengths) or q_THK.shape[1] % k_TGK.shape[1]:
        raise ValueError(
            f"q {list(q_THK.shape)} and k {list(k_TGK.shape)} do not fit {sum(lengths)} tokens"
        )
    if q_THK.is_cuda and q_THK.dtype in (torch.bfloat16, torch.float16):
        groups = q_THK.shape[1] // k_TGK.shape[1]
        if groups > 1:
            k_TGK, v_TGK = (x.repeat_interleave(groups, dim=1) for x in (k_TGK, v_TGK))
        left = -1 if window is None else window - 1
        longest = max(lengths)
        return varlen_attn(  # type: ignore[return-value]
            q_THK,
            k_TGK,
            v_TGK,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            scale=scale,
            window_size=(left, 0),
        )
    parts = (x.split(lengths) for x in (q_THK, k_TGK, v_TGK))
    return torch.cat([_document(q, k, v, scale, window) for q, k, v in zip(*parts, strict=True)])


def _document(q_THK, k_TGK, v_TGK, scale: float, window: int | None) -> Tensor:
    tokens = q_THK.shape[0]
    mask = None
    if window is not None and window < tokens:
        distance = torch.arange(tokens, device=q_THK.device)
        distance = distance[:, None] - distance
        mask = (distance >= 0) & (distance < window)
    heads_first = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    o_BHTK = F.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return o_BHTK[0].transpose(0, 1)
