"""Norms as a product's factor, which backward computes again beside the gradients."""

import torch
from torch import Tensor

from mixtron.kernels.factor import Factor, Op, gradients_by_autograd
from mixtron.kernels.norms.op import add_rms_norm, rms_norm
from mixtron.kernels.norms.triton_op import gradients
from mixtron.kernels.split import Place
from mixtron.kernels.triton_tools import Form, form_for


def add_rms_norm_factor(
    x: Tensor, added: Tensor | None, weight_N: Tensor, eps: float, *, backend: Form | None = None
) -> Factor:
    """The norm of `add_rms_norm`; the sum is `beside`. Kept are the sum and the weight."""
    return Factor(_AddNorm(eps, form_for(x, backend)), x, added, weight_N)


def gated_norm_factor(
    o_BTJV: Tensor,
    weight_V: Tensor,
    gate_BTJV: Tensor,
    eps: float,
    *,
    gate_place: Place | None = None,
    backend: Form | None = None,
) -> Factor:
    """`rms_norm` of each head with a gate, as [T, B, J V]. Kept are o, weight and gate."""
    op = _GatedNorm(eps, form_for(o_BTJV, backend), gate_place)
    return Factor(op, o_BTJV, weight_V, gate_BTJV)


class _AddNorm(Op):
    def __init__(self, eps: float, form: Form) -> None:
        self.eps = eps
        self.form: Form = form

    def compute(self, x, added, weight_N):
        total, y = add_rms_norm(x, added, weight_N, self.eps, backend=self.form)
        self.adds = added is not None
        if not self.adds:
            return y, (x.view_as(x),), (x, weight_N)
        return y, (total,), (total, weight_N)

    def gradients(self, kept, dy, dtotal):  # type: ignore[override]
        total, weight_N = kept
        if self.form == "torch":

            def norm(x, weight_N):
                return add_rms_norm(x, None, weight_N, self.eps, backend="torch")

            (_, y), (dx, dweight_N) = gradients_by_autograd(norm, kept, [dtotal, dy])
        else:
            y, dtotal = torch.empty_like(dy), dtotal.contiguous()
            dx, dweight_N = gradients(total, weight_N, None, dy, self.eps, "rms", dtotal, y=y)
        return y, (dx, dx if self.adds else None, dweight_N)


class _GatedNorm(Op):
    def __init__(self, eps: float, form: Form, gate_place: Place | None) -> None:
        self.eps, self.gate_place = eps, gate_place
        self.form: Form = form

    def compute(self, o_BTJV, weight_V, gate_BTJV):
        return self._again(o_BTJV, weight_V, gate_BTJV), (), (o_BTJV, weight_V, gate_BTJV)

    def gradients(self, kept, dy):
        o_BTJV, weight_V, gate_BTJV = kept
        if self.form == "torch":
            (y,), found = gradients_by_autograd(lambda *x: [self._again(*x)], kept, [dy])
            return y, found
        dy_BTJV = dy.transpose(0, 1).unflatten(-1, o_BTJV.shape[2:]).contiguous()
        dgate = self.gate_place() if self.gate_place else torch.empty_like(dy_BTJV)
        options = {"dgate": dgate, "y": dy_BTJV}
        found = gradients(o_BTJV, weight_V, gate_BTJV, dy_BTJV, self.eps, "rms", **options)
        return by_token(dy_BTJV), (*found, dgate)

    def _again(self, o_BTJV, weight_V, gate_BTJV):
        y = rms_norm(o_BTJV, weight_V, self.eps, gate=gate_BTJV, backend=self.form)
        return by_token(y)


def by_token(o_BTJV: Tensor) -> Tensor:
    """[T, B, J V]."""
    o_TBE = o_BTJV.flatten(2).transpose(0, 1)
    # Through reshape for its strides: products of a transposed view go token by token.
    return o_TBE.reshape(o_TBE.shape)
