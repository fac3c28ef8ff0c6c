"""SwiGLU: torch's form on the CPU, one Triton kernel each way on a GPU."""

import torch.nn.functional as F
from torch import Tensor

from mixtron.kernels.swiglu.triton_op import swiglu_triton
from mixtron.kernels.triton_tools import Form, form_for


def swiglu(joined: Tensor, *, backend: Form | None = None) -> Tensor:
    """SiLU(gate) up, of the halves (gate, up) of the last dimension (arXiv 2002.05202).

    Args:
        joined   [..., 2 F]  bf16, fp16 or fp32 (torch's form also fp64); fp32 inside Triton's.
        backend  torch or triton; None: triton on a GPU, torch elsewhere.
    Returns:
        [..., F] in joined's dtype. Triton's form keeps `joined` for backward and nothing else.
    Raises:
        ValueError: an odd width, or a dtype that the form cannot take.
    """
    if joined.shape[-1] % 2:
        raise ValueError(f"joined {list(joined.shape)}: the last dimension has no two halves")
    if form_for(joined, backend) == "triton":
        return swiglu_triton(joined)
    gate, up = joined.chunk(2, dim=-1)
    return F.silu(gate) * up
