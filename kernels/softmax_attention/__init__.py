"""Causal softmax attention over packed documents."""

from mixtron.kernels.softmax_attention.packed import softmax_attention
from mixtron.kernels.softmax_attention.reference import softmax_attention_reference
from mixtron.kernels.softmax_attention.rope import apply_rope

__all__ = ["apply_rope", "softmax_attention", "softmax_attention_reference"]
