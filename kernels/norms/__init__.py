"""RMSNorm, with or without a SiLU gate, and L2 normalisation, over the last dimension."""

from mixtron.kernels.norms.factor import add_rms_norm_factor, by_token, gated_norm_factor
from mixtron.kernels.norms.op import add_rms_norm, rms_norm, unit_norm
from mixtron.kernels.norms.reference import rms_norm_reference, unit_norm_reference

__all__ = [
    "add_rms_norm",
    "add_rms_norm_factor",
    "by_token",
    "gated_norm_factor",
    "rms_norm",
    "rms_norm_reference",
    "unit_norm",
    "unit_norm_reference",
]
