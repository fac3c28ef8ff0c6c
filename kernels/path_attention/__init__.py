"""PaTH attention, PaTH-FoX, FoX and softmax attention as one op."""

from mixtron.kernels.path_attention.blockwise import path_attention_with_lse
from mixtron.kernels.path_attention.decode import path_attention_step
from mixtron.kernels.path_attention.op import path_attention
from mixtron.kernels.path_attention.past import (
    PastGradients,
    attend_past,
    attend_past_backward,
    past_queries,
)
from mixtron.kernels.path_attention.reference import path_attention_reference
from mixtron.kernels.path_attention.segment import (
    PastKeys,
    Segment,
    documents,
    past_of,
    path_segment,
)

__all__ = [
    "PastGradients",
    "PastKeys",
    "Segment",
    "attend_past",
    "attend_past_backward",
    "documents",
    "past_of",
    "past_queries",
    "path_attention",
    "path_attention_reference",
    "path_attention_step",
    "path_attention_with_lse",
    "path_segment",
]
