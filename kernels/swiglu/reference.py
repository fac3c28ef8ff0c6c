"""SwiGLU as its definition."""

import torch
from torch import Tensor


def swiglu_reference(joined: Tensor) -> Tensor:
    """gate sigmoid(gate) up, of the halves (gate, up) of the last dimension."""
    gate, up = joined.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
