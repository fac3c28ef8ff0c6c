"""Causal linear attention with ELU + 1 features, normalised."""

from mixtron.kernels.linear_attention.op import (
    linear_attention,
    linear_attention_segment_map,
    linear_attention_step,
)
from mixtron.kernels.linear_attention.reference import linear_attention_reference

__all__ = [
    "linear_attention",
    "linear_attention_reference",
    "linear_attention_segment_map",
    "linear_attention_step",
]
