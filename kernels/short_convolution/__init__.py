"""Causal depthwise convolution over packed documents."""

from mixtron.kernels.short_convolution.reference import short_convolution_reference
from mixtron.kernels.short_convolution.shifted import short_convolution

__all__ = ["short_convolution", "short_convolution_reference"]
