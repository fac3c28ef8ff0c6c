"""One token of PaTH attention: its cached keys are carried on, then plain attention reads them."""

import math
from typing import Literal

import torch
from torch import Tensor

from mixtron.kernels.path_attention.triton_decode import path_attention_step_triton
from mixtron.kernels.recurrence import GATE_DTYPES


def path_attention_step(
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    gate_BSH: Tensor | None,
    length_B: Tensor,
    q_BHK: Tensor,
    k_BGK: Tensor,
    v_BGV: Tensor,
    w_BGK: Tensor | None = None,
    beta_BG: Tensor | None = None,
    log_forget_BH: Tensor | None = None,
    *,
    scale: float | None = None,
    gate_scale: float = 1.0,
    backend: Literal["block", "triton"] = "block",
) -> Tensor:
    """The next token of each sequence (arXiv 2505.16381): k_j <- H_t k_j for all cached keys j,
    in place, and the new key, value and gate written behind each sequence's own last one.

    Args:
        k_BSGK    [B, S, G, K]  the key cache. With w fp32 or fp64 whatever the model's dtype: in
                  bf16 the error of keys that are updated at every token grows to several per cent.
        v_BSGV    [B, S, G, V]  the values.
        gate_BSH  [B, S, H]     sums of the log gates behind each key, fp32 or fp64; or None.
        length_B  [B] int64     tokens that each sequence has in the cache; below S.
        others    as in `path_attention`, without the token dimension.
        backend   "triton" reads and writes the cache once, on a GPU; "block" is torch's.
    Returns:
        o_BHV [B, H, V] in v's dtype.
    Raises:
        ValueError: a key cache below fp32 that maps would be applied to.
    """
    if w_BGK is not None and k_BSGK.dtype not in GATE_DTYPES:
        raise ValueError(f"k_BSGK is {k_BSGK.dtype}, expected fp32 or fp64 with w_BGK")
    scale = 1 / math.sqrt(q_BHK.shape[-1]) if scale is None else scale
    if backend == "triton":
        new = (q_BHK, k_BGK, v_BGV, w_BGK, beta_BG, log_forget_BH)
        return path_attention_step_triton(
            k_BSGK, v_BSGV, gate_BSH, length_B, *new, scale=scale, gate_scale=gate_scale
        )
    dtype, (S, G) = torch.promote_types(k_BSGK.dtype, torch.float32), k_BSGK.shape[1:3]
    row = torch.arange(len(length_B), device=length_B.device)
    if w_BGK is not None and beta_BG is not None:
        w_BGK = w_BGK.to(dtype)
        along_BSG = torch.einsum("bsgk,bgk->bsg", k_BSGK, w_BGK) * beta_BG.to(dtype)[:, None]
        k_BSGK.sub_(along_BSG[..., None] * w_BGK[:, None])
    k_BSGK[row, length_B] = k_BGK.to(k_BSGK.dtype)
    v_BSGV[row, length_B] = v_BGV.to(v_BSGV.dtype)
    q_BGRK = q_BHK.to(dtype).unflatten(1, (G, -1))
    logits_BGRS = torch.einsum("bgrk,bsgk->bgrs", q_BGRK, k_BSGK.to(dtype))
    logits_BGRS = scale * logits_BGRS
    if gate_BSH is not None and log_forget_BH is not None:
        gate_BSH.add_(log_forget_BH.to(gate_BSH.dtype)[:, None])
        gate_BSH[row, length_B] = 0
        logits_BGRS = logits_BGRS + gate_scale * gate_BSH.transpose(1, 2).unflatten(1, (G, -1))
    unwritten_BS = torch.arange(S, device=length_B.device) > length_B[:, None]
    weights_BGRS = logits_BGRS.masked_fill(unwritten_BS[:, None, None], float("-inf")).softmax(-1)
    o_BGRV = torch.einsum("bgrs,bsgv->bgrv", weights_BGRS, v_BSGV.to(dtype))
    return o_BGRV.flatten(1, 2).to(v_BGV.dtype)
