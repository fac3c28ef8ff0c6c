"""Packed causal attention through torch's own kernels, or ours; nothing of size T^2 is kept."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from mixtron.kernels.path_attention import path_attention

Backend = Literal["torch", "cudnn", "triton"]


def softmax_attention(
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    lengths: list[int] | None,
    cu_seqlens: Tensor,
    *,
    scale: float,
    max_seqlen: int | None = None,
    window: int | None = None,
    backend: Backend = "torch",
) -> Tensor:
    """Causal softmax attention inside each document.

    Args:
        q_THK       [T, H, K]  H query heads, a multiple of G.
        k_TGK       [T, G, K]  query head h reads key/value head h // (H/G).
        v_TGK       [T, G, K]
        lengths     the documents' lengths on the host; they sum to T. None on a GPU, for backends
                    torch and triton, which need no more than `max_seqlen`.
        cu_seqlens  [N+1] int32 on the device, may be padded by repeating T.
        max_seqlen  at least the longest document's length, where `lengths` are not given.
        window      a token attends this many tokens, itself included; None is all.
        backend     torch: on a GPU in bf16 and fp16 FlashAttention-2 over all documents at once,
                    otherwise scaled_dot_product_attention, document by document. cudnn: cuDNN's
                    where all documents have one length, FlashAttention-2 where they have not, on a
                    GPU in bf16 or fp16. triton: kernels/path_attention without its maps, on a GPU
                    in bf16 with K of 64 or 128. The last two take no window.
    Returns:
        [T, H, K] in q's dtype.
    Raises:
        ValueError: shapes that do not fit, or what a backend does not take.
    """
    tokens = len(q_THK) if lengths is None else sum(lengths)
    if q_THK.shape[0] != tokens or q_THK.shape[1] % k_TGK.shape[1]:
        raise ValueError(
            f"q {list(q_THK.shape)} and k {list(k_TGK.shape)} do not fit {tokens} tokens"
        )
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}, expected one of {', '.join(get_args(Backend))}")
    if backend != "torch" and window is not None:
        raise ValueError(f"window={window}: backend {backend!r} takes none")
    longest = max_seqlen if lengths is None else max(lengths)
    if longest is None:
        raise ValueError("either lengths or max_seqlen is needed")
    if backend == "triton":
        batched = (x.unsqueeze(0) for x in (q_THK, k_TGK, v_TGK))
        options = {"cu_seqlens": cu_seqlens, "max_seqlen": longest, "backend": "triton"}
        return path_attention(*batched, scale=scale, **options).squeeze(0)
    on_gpu = q_THK.is_cuda and q_THK.dtype in (torch.bfloat16, torch.float16)
    if backend == "cudnn" and not on_gpu:
        raise ValueError(f"q is {q_THK.dtype} on {q_THK.device}: cudnn takes bf16 on a GPU")
    if on_gpu:
        groups = q_THK.shape[1] // k_TGK.shape[1]
        if groups > 1:
            k_TGK, v_TGK = (x.repeat_interleave(groups, dim=1) for x in (k_TGK, v_TGK))
        if backend == "cudnn" and lengths is not None and longest == min(lengths):
            return _cudnn(q_THK, k_TGK, v_TGK, len(lengths), scale)
        left = -1 if window is None else window - 1
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
    if lengths is None:
        raise ValueError(
            f"q is {q_THK.dtype} on {q_THK.device}: without lengths nothing runs there"
        )
    parts = (x.split(lengths) for x in (q_THK, k_TGK, v_TGK))
    return torch.cat([_document(q, k, v, scale, window) for q, k, v in zip(*parts, strict=True)])


def _cudnn(q_THK, k_THK, v_THK, documents: int, scale: float) -> Tensor:
    """Documents of one length as the rows of a batch.

    cuDNN also takes packed ones, by their offsets, but torch 2.11 gets wrong gradients of them.
    """
    rows = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (q_THK, k_THK, v_THK))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        o_BHTK = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale)
    return o_BHTK.transpose(1, 2).flatten(0, 1)


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
