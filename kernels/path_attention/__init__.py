"""PaTH attention, PaTH-FoX, FoX and softmax attention as one op."""

from mixtron.kernels.path_attention.decode import path_attention_step
from mixtron.kernels.path_attention.op import path_attention
from mixtron.kernels.path_attention.reference import path_attention_reference
from mixtron.kernels.path_attention.segment import PastKeys, Segment, past_with, path_segment

__all__ = [
    "PastKeys",
    "Segment",
    "past_with",
    "path_attention",
    "path_attention_reference",
    "path_attention_step",
    "path_segment",
]
