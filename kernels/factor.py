"""Products that keep what their left factor is computed from, not the factor.

    y = f(inputs),   out = y W^T
    dy = dout W,   d inputs and y again by f's backward,   dW = dout^T y

f's backward reads what y is made of anyway, so that the recomputation costs one more write.
"""

from typing import Any

import torch
from torch import Tensor

from mixtron.kernels.products import add_product


class Op:
    """What computes a factor; it holds options, no tensors."""

    def compute(self, *inputs: Any) -> tuple[Tensor, tuple, tuple]:
        """y, what the op gives besides, and what it keeps for backward."""
        raise NotImplementedError

    def gradients(self, kept: list[Any], dy: Tensor, *dbeside: Tensor) -> tuple[Tensor, tuple]:
        """y again, which may lie in dy's memory, and the inputs' gradients."""
        raise NotImplementedError


class Factor:
    """A factor that its product computes, and computes again in backward."""

    def __init__(self, op: Op, *inputs: Tensor | None) -> None:
        self.op, self.inputs = op, inputs
        self.beside: tuple[Tensor, ...] = ()
        """What the op gives besides the factor, once there is the product."""

    def times(self, weight_NK: Tensor, *, adds: bool) -> Tensor:
        """y W^T, of y [..., K].

        Args:
            adds: the weight's gradient is added to its `main_grad`, in that one's dtype, and marked
                as Megatron's layers mark it.
        """
        product, *beside = _Product.apply(self.op, adds, weight_NK, *self.inputs)  # type: ignore[misc]
        self.inputs, self.beside = (), tuple(beside)
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, adds, weight_NK, *inputs):
        y, beside, kept = op.compute(*inputs)
        ctx.save_for_backward(weight_NK, *kept)
        ctx.op, ctx.adds = op, adds
        return torch.matmul(y, weight_NK.t()), *beside

    @staticmethod
    def backward(ctx, dout, *dbeside):  # type: ignore[override]
        weight_NK, *kept = ctx.saved_tensors
        y, found = ctx.op.gradients(kept, dout.matmul(weight_NK), *dbeside)
        dweight = weight_gradient(weight_NK, dout, y, adds=ctx.adds)
        return None, None, dweight, *found


def weight_gradient(weight_NK: Tensor, dout: Tensor, y: Tensor, *, adds: bool) -> Tensor:
    """Of the weight of y W^T = out, of y [..., K] and out's gradient [..., N].

    Args:
        adds: to the weight's `main_grad`, in that one's dtype, and marked as Megatron's layers mark
            it; what is returned then has no values.
    """
    dout_NT, y_TK = dout.flatten(0, -2).t(), y.flatten(0, -2)
    if not adds:
        return dout_NT.matmul(y_TK)
    add_product(weight_NK.main_grad, dout_NT, y_TK)  # type: ignore[attr-defined]
    weight_NK.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Megatron's hooks want a gradient, which they leave where it is.
    return torch.empty_like(weight_NK)


def gradients_by_autograd(f: Any, inputs: list[Any], gradients: list[Tensor]) -> tuple:
    """Outputs of f again, and the inputs' gradients from the outputs'."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = f(*leaves)
        found = torch.autograd.grad(outputs, leaves, gradients)
    return [x.detach() for x in outputs], found
