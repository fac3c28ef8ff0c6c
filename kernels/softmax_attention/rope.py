"""Rotary position embedding (arXiv 2104.09864), halves rotated against each other."""

import torch
from torch import Tensor

from mixtron.kernels.softmax_attention.triton_rope import rope_triton
from mixtron.kernels.split import Place
from mixtron.kernels.triton_tools import Form, form_for


def apply_rope(
    x_THK: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    *,
    place: Place | None = None,
    backend: Form | None = None,
) -> Tensor:
    """Rotates (x[r], x[r + K/2]) by the token's angle r. cos and sin are [T, K/2] fp32.

    `place`: where Triton's form writes the gradient of x (kernels/split.py). `backend`: torch or
    triton; None: triton on a GPU, torch elsewhere.
    """
    if form_for(x_THK, backend) == "triton":
        return rope_triton(x_THK, cos_TR, sin_TR, place)
    first, second = x_THK.to(torch.promote_types(x_THK.dtype, cos_TR.dtype)).chunk(2, dim=-1)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x_THK.dtype)
