"""S-D attention over packed documents: skew-symmetric routing and diagonal damping."""

from mixtron.kernels.sd_attention.decode import sd_attention_step
from mixtron.kernels.sd_attention.op import sd_attention
from mixtron.kernels.sd_attention.reference import interaction, sd_attention_reference

__all__ = ["interaction", "sd_attention", "sd_attention_reference", "sd_attention_step"]
