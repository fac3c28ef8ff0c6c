"""The convolution: torch's form on the CPU, one Triton kernel each way on a GPU."""

import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.short_convolution.shifted import short_convolution_shifted
from mixtron.kernels.short_convolution.triton_op import short_convolution_triton
from mixtron.kernels.triton_tools import Form, form_for


def short_convolution(
    x_TBE: Tensor,
    weight_EW: Tensor,
    position_T: Tensor,
    *,
    silu: bool = False,
    backend: Form | None = None,
) -> Tensor:
    """Causal depthwise convolution that does not reach over a document's start; then SiLU if asked.

    y_t = sum over i < W of weight[:, i] * x_{t-i}, where t-i is in t's document.

    Args:
        x_TBE       [T, B, E]  any float dtype; the same documents in every column of B.
        weight_EW   [E, W]     tap i weighs the token i steps back. Products are summed in fp32.
        position_T  [T]        each token's position in its document. It must be below T + 1 steps
                               from the stream's start, i.e. the stream begins a document.
        backend     torch or triton; None: triton on a GPU, torch elsewhere.
    Returns:
        [T, B, E] in x's dtype. Only the arguments are kept for backward, by torch's form also
        SiLU's input.
    Raises:
        ValueError: shapes that do not fit, or a dtype that the form cannot take.
    """
    widths = (x_TBE.shape[-1],)
    return short_convolution_parts(
        x_TBE, weight_EW, position_T, widths, silu=silu, backend=backend
    )[0]


def short_convolution_parts(
    x_TBE: Tensor,
    weight_EW: Tensor,
    position_T: Tensor,
    widths: tuple[int, ...],
    *,
    silu: bool = False,
    backend: Form | None = None,
) -> tuple[Tensor, ...]:
    """`short_convolution`, split along E into parts of these widths; Triton's are dense each."""
    if x_TBE.dim() != 3 or weight_EW.shape[:1] != x_TBE.shape[2:]:
        raise ValueError(f"weight {list(weight_EW.shape)} does not fit x {list(x_TBE.shape)}")
    if position_T.shape != x_TBE.shape[:1]:
        raise ValueError(f"position {list(position_T.shape)} does not fit x {list(x_TBE.shape)}")
    if sum(widths) != x_TBE.shape[2]:
        raise ValueError(f"widths {widths} do not sum to x's {x_TBE.shape[2]} channels")
    if form_for(x_TBE, backend) == "triton":
        return short_convolution_triton(x_TBE, weight_EW, position_T, widths, silu=silu)
    y_TBE = short_convolution_shifted(x_TBE, weight_EW, position_T)
    return (F.silu(y_TBE) if silu else y_TBE).split(widths, dim=-1)
