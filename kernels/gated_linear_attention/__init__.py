"""Gated linear attention: one op for GLA (a decay a key channel) and Mamba-2 (one a head)."""

from mixtron.kernels.gated_linear_attention.chunk import gated_linear_segment_map
from mixtron.kernels.gated_linear_attention.decode import gated_linear_step
from mixtron.kernels.gated_linear_attention.op import gated_linear_attention
from mixtron.kernels.gated_linear_attention.reference import gated_linear_attention_reference

__all__ = [
    "gated_linear_attention",
    "gated_linear_attention_reference",
    "gated_linear_segment_map",
    "gated_linear_step",
]
