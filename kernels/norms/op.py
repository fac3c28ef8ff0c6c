"""The norms: torch's form on the CPU, one Triton kernel each way on a GPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.norms.triton_op import add_norm_triton, norm_triton
from mixtron.kernels.split import Place
from mixtron.kernels.triton_tools import Form, form_for


def rms_norm(
    x: Tensor,
    weight_N: Tensor,
    eps: float,
    *,
    gate: Tensor | None = None,
    gate_place: Place | None = None,
    backend: Form | None = None,
) -> Tensor:
    """x / rms(x) * weight over the last dimension; with a gate, times SiLU(gate).

    Args:
        x         [..., N]  bf16, fp16 or fp32 (torch's form also fp64); fp32 inside.
        weight_N  [N]
        gate      [..., N]  of x's shape; it and x may be views with strides of their own.
        gate_place  where Triton's form writes the gate's gradient (kernels/split.py).
        backend   torch or triton; None: triton on a GPU, torch elsewhere.
    Returns:
        [..., N] in x's dtype. Triton's form keeps x, weight and gate for backward and nothing else.
    Raises:
        ValueError: shapes that do not fit, or a dtype that the form cannot take.
    """
    if weight_N.shape != x.shape[-1:] or (gate is not None and gate.shape != x.shape):
        shapes = [list(t.shape) for t in (x, weight_N, gate) if t is not None]
        raise ValueError(f"x, weight and gate do not fit: {shapes}")
    if form_for(x, backend) == "triton":
        return norm_triton(x, weight_N, gate, eps, "rms", gate_place)
    y = F.rms_norm(x, weight_N.shape, weight_N, eps)
    return y if gate is None else y * F.silu(gate)


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight_N: Tensor, eps: float, *, backend: Form | None = None
) -> tuple[Tensor, Tensor]:
    """(x + added, `rms_norm` of it), both in x's dtype: a residual stream and what a layer reads.

    With nothing to add, x itself: Triton's backward adds both gradients of x in the norm's pass.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a dtype that the form cannot take.
    """
    fits = added is None or (added.shape == x.shape and added.dtype == x.dtype)
    if not fits or weight_N.shape != x.shape[-1:]:
        shapes = [(list(t.shape), t.dtype) for t in (x, added, weight_N) if t is not None]
        raise ValueError(f"x, what is added and the weight do not fit: {shapes}")
    if form_for(x, backend) == "triton":
        return add_norm_triton(x, added, weight_N, eps)
    total = x if added is None else x + added
    return total, F.rms_norm(total, weight_N.shape, weight_N, eps)


def unit_norm(
    x: Tensor,
    eps: float = 1e-12,
    *,
    dtype: torch.dtype | None = None,
    backend: Form | None = None,
) -> Tensor:
    """x / max(|x|, eps) over the last dimension, fp32 inside, in `dtype` (None: x's). Other
    arguments as of `rms_norm`."""
    dtype = dtype or x.dtype
    if form_for(x, backend) == "triton":
        return norm_triton(x, None, None, eps, "unit", dtype=dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.normalize(x.to(wide), dim=-1, eps=eps).to(dtype)
