"""SwiGLU's output as a product's factor, which backward computes again beside the gradients."""

from torch import Tensor

from mixtron.kernels.factor import Factor, Op, gradients_by_autograd
from mixtron.kernels.swiglu.op import swiglu
from mixtron.kernels.swiglu.triton_op import gradient
from mixtron.kernels.triton_tools import Form, form_for


def swiglu_factor(joined: Tensor, *, backend: Form | None = None) -> Factor:
    """`swiglu(joined)`, for the product that reads it. Kept is `joined`."""
    return Factor(_SwiGLU(form_for(joined, backend)), joined)


class _SwiGLU(Op):
    def __init__(self, form: Form) -> None:
        self.form: Form = form

    def compute(self, joined):
        return swiglu(joined, backend=self.form), (), (joined,)

    def gradients(self, kept, dy):
        (joined,) = kept
        if self.form == "torch":
            (y,), found = gradients_by_autograd(lambda x: [swiglu(x, backend="torch")], kept, [dy])
            return y, found
        return dy, (gradient(joined.contiguous(), dy, dy),)
