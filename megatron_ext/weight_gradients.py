"""Weights' gradients that matrix products add to Megatron's buffers themselves.

Megatron has this for a CUDA extension that is not used here; torch's product does the same. So a
gradient is not rounded to the model's dtype, written, read again and added by a kernel of its own.
"""

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel import layers as library
from torch import Tensor, nn

from mixtron.kernels.products import add_product
from mixtron.megatron_ext.output_layer import OutputLayer


class _Products:
    """Stands for the extension's module."""

    @staticmethod
    def wgrad_gemm_accum_fp32(input_TK: Tensor, gradient_TN: Tensor, total_NK: Tensor) -> None:
        add_product(total_NK, gradient_TN.t(), input_TK)


def add_in_products(chunk: nn.Module) -> None:
    """For the linear layers of a model whose parameters have fp32 buffers (`main_grad`).

    Not within hooks on saved tensors, as `recompute.py` has them: the weight that backward finds
    is then another object than the parameter, and Megatron would not know of its gradient.
    """
    library.fused_weight_gradient_mlp_cuda = _Products  # type: ignore[attr-defined]
    for module in chunk.modules():
        # An output layer's weight may be the embedding's as well, which adds its own gradient.
        linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
        if linear and not isinstance(module, OutputLayer):
            module.gradient_accumulation_fusion = True
