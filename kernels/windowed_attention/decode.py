"""Attention of each sequence's newest token over chosen rows of its cache."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.windowed_attention.permutation import Backend
from mixtron.kernels.windowed_attention.triton_decode import attend_rows


def windowed_attention_step(
    q_BHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    row_BW: Tensor,
    attended_BW: Tensor,
    *,
    backend: Backend = "tiled",
) -> Tensor:
    """[B, H, V]: softmax attention, scaled by K^-1/2, over W rows of each sequence's cache.

    Args:
        q_BHK        query head h reads key/value head h // (H/G).
        k_BSGK, v_BSGV   the caches, whose sequences may have room behind their S rows.
        row_BW       int64; those that are not attended may lie outside of the cache.
        attended_BW  bool: which of them, at least one of each sequence.
        backend      "tiled" in torch on any device, "triton" on a GPU, which copies no rows.
    """
    if backend == "triton":
        return attend_rows(
            q_BHK, k_BSGK, v_BSGV, row_BW, attended_BW, scale=q_BHK.shape[-1] ** -0.5
        )
    sequence_B1 = torch.arange(len(q_BHK), device=q_BHK.device)[:, None]
    row_BW = row_BW.clamp(0, k_BSGK.shape[1] - 1)
    k_BGWK, v_BGWV = (x[sequence_B1, row_BW].transpose(1, 2) for x in (k_BSGK, v_BSGV))
    o_BH1V = F.scaled_dot_product_attention(
        q_BHK[:, :, None], k_BGWK, v_BGWV, attn_mask=attended_BW[:, None, None], enable_gqa=True
    )
    return o_BH1V[:, :, 0]
