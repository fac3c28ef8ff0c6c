"""Cross-entropy of a linear layer's outputs, without holding them."""

from mixtron.kernels.linear_cross_entropy.op import linear_cross_entropy
from mixtron.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]
