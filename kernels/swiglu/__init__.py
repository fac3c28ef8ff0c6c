"""SwiGLU: the gated activation between an MLP's projections."""

from mixtron.kernels.swiglu.factor import swiglu_factor
from mixtron.kernels.swiglu.op import swiglu
from mixtron.kernels.swiglu.reference import swiglu_reference

__all__ = ["swiglu", "swiglu_factor", "swiglu_reference"]
