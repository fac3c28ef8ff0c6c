"""One pass over a row of logits for its statistics, and one for its gradient, in place."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""Instead of -inf, whose difference to itself is no number."""


@triton.jit
def cross_entropy_statistics_kernel(
    logits_CV,
    label_C,
    share_C,
    lse_C,
    label_logit_C,
    used,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """With GRADIENT then what `cross_entropy_gradient_kernel` does, which finds the row in the
    cache."""
    row = tl.program_id(0).to(tl.int64)
    column_V = tl.arange(0, BLOCK_V)
    logits = logits_CV + row * V
    label = tl.load(label_C + row)
    here = (label >= 0) & (label < used)
    tl.store(label_logit_C + row, tl.load(logits + label, here, 0.0).to(tl.float32))
    top_V = tl.full([BLOCK_V], LOWEST, tl.float32)
    sum_V = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, used, BLOCK_V):
        x_V = tl.load(logits + first + column_V, first + column_V < used, LOWEST).to(tl.float32)
        new_V = tl.maximum(top_V, x_V)
        sum_V = sum_V * tl.exp(top_V - new_V) + tl.exp(x_V - new_V)
        top_V = new_V
    top = tl.max(top_V, 0)
    lse = top + tl.log(tl.sum(sum_V * tl.exp(top_V - top), 0))
    tl.store(lse_C + row, lse)
    if GRADIENT:
        _gradient(logits, label, lse, tl.load(share_C + row), used, V, BLOCK_V)


@triton.jit
def cross_entropy_gradient_kernel(
    logits_CV, label_C, lse_C, share_C, used, V: tl.constexpr, BLOCK_V: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label, lse, share = tl.load(label_C + row), tl.load(lse_C + row), tl.load(share_C + row)
    _gradient(logits_CV + row * V, label, lse, share, used, V, BLOCK_V)


@triton.jit
def _gradient(logits, label, lse, share, used, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Of one row, in its place."""
    for first in range(0, V, BLOCK_V):
        v_V = first + tl.arange(0, BLOCK_V)
        x_V = tl.load(logits + v_V, v_V < used, LOWEST).to(tl.float32)
        gradient_V = (tl.exp(x_V - lse) - tl.where(v_V == label, 1.0, 0.0)) * share
        gradient_V = tl.where(v_V < used, gradient_V, 0.0)
        tl.store(logits + v_V, gradient_V.to(logits.dtype.element_ty), v_V < V)
