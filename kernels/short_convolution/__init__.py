"""Causal depthwise convolution over packed documents."""

from mixtron.kernels.short_convolution.op import short_convolution, short_convolution_parts
from mixtron.kernels.short_convolution.reference import short_convolution_reference

__all__ = ["short_convolution", "short_convolution_parts", "short_convolution_reference"]
