"""Log-linear attention: a Fenwick tree over the past of gated linear or gated delta states."""

from mixtron.kernels.log_linear_attention.chunk import continue_states, log_linear_segment_map
from mixtron.kernels.log_linear_attention.decode import log_linear_step
from mixtron.kernels.log_linear_attention.fenwick import bits, node_of, node_start, required_levels
from mixtron.kernels.log_linear_attention.op import log_linear_attention
from mixtron.kernels.log_linear_attention.reference import (
    log_linear_attention_recurrent,
    log_linear_attention_reference,
)

__all__ = [
    "bits",
    "continue_states",
    "log_linear_attention",
    "log_linear_attention_recurrent",
    "log_linear_attention_reference",
    "log_linear_segment_map",
    "log_linear_step",
    "node_of",
    "node_start",
    "required_levels",
]
