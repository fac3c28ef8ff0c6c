"""Causal attention over a window of a permuted order: Stochastic Attention and, unpermuted, SWA."""

from mixtron.kernels.windowed_attention.decode import windowed_attention_step
from mixtron.kernels.windowed_attention.op import windowed_attention
from mixtron.kernels.windowed_attention.permutation import (
    document_permutation,
    document_permutations,
    permutation_hash,
)
from mixtron.kernels.windowed_attention.plan import WindowPlan, plan_windows
from mixtron.kernels.windowed_attention.reference import (
    attended_pairs,
    windowed_attention_reference,
)
from mixtron.kernels.windowed_attention.triton_gates import gated_sum
from mixtron.kernels.windowed_attention.window import window_reach

__all__ = [
    "WindowPlan",
    "attended_pairs",
    "document_permutation",
    "document_permutations",
    "gated_sum",
    "permutation_hash",
    "plan_windows",
    "window_reach",
    "windowed_attention",
    "windowed_attention_reference",
    "windowed_attention_step",
]
