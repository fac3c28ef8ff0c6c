"""Launches the norms' kernels and gives them to autograd."""

# Launches take keywords that the kernels' signatures do not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

import torch
import triton
from torch import Tensor

from mixtron.kernels.launching import Launched
from mixtron.kernels.norms.triton_kernels import norm_backward_kernel, norm_forward_kernel
from mixtron.kernels.split import Place

TILE_ELEMENTS = 2048
GATED_TILE_ELEMENTS = 1024
WARPS = 2
"""Of such a tile, both ways: backward's sum of squares is then forward's, and y again its y."""
MAX_WIDTH = 16384
STRIPS = 1024
"""Programs of a backward at most; each sums its rows' part of the weight's gradient."""


forward_rows, backward_rows = Launched(norm_forward_kernel), Launched(norm_backward_kernel)


def norm_triton(
    x: Tensor,
    weight_N: Tensor | None,
    gate: Tensor | None,
    eps: float,
    kind: str,
    gate_place: Place | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`rms_norm` (kind rms) or `unit_norm` (kind unit), in `dtype` (None: x's).

    Raises:
        ValueError: too wide rows.
    """
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"x {list(x.shape)}: the triton form takes rows up to {MAX_WIDTH} wide")
    options = eps, kind, gate_place, dtype
    return _Norm.apply(x, weight_N, gate, *options)  # type: ignore[return-value]


def add_norm_triton(x: Tensor, added: Tensor | None, weight_N: Tensor, eps: float) -> tuple:
    """`add_rms_norm`. Raises ValueError for too wide rows."""
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"x {list(x.shape)}: the triton form takes rows up to {MAX_WIDTH} wide")
    return _AddNorm.apply(x, added, weight_N, eps)  # type: ignore[return-value]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_N, gate, eps, kind, gate_place, dtype):
        ctx.save_for_backward(x, weight_N, gate)
        ctx.eps, ctx.kind, ctx.gate_place = eps, kind, gate_place
        return normalise(x, weight_N, gate, eps, kind, dtype=dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, weight_N, gate = ctx.saved_tensors
        dgate = None if gate is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if ctx.gate_place is not None:
            dgate = ctx.gate_place()
        found = gradients(x, weight_N, gate, dy, ctx.eps, ctx.kind, dgate=dgate)
        return *found, dgate, None, None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, added, weight_N, eps):
        total, y = add_and_normalise(x, added, weight_N, eps)
        ctx.save_for_backward(total, weight_N)
        ctx.eps, ctx.adds = eps, added is not None
        return total, y

    @staticmethod
    def backward(ctx, dtotal, dy):  # type: ignore[override]
        total, weight_N = ctx.saved_tensors
        dtotal = dtotal.contiguous()
        dx, dweight_N = gradients(total, weight_N, None, dy, ctx.eps, "rms", dtotal)
        return dx, dx if ctx.adds else None, dweight_N, None


def add_and_normalise(x, added, weight_N, eps: float) -> tuple[Tensor, Tensor]:
    """x + added and its norm; x itself, as a view, with nothing to add."""
    if added is None:
        return x.view_as(x), normalise(x, weight_N, None, eps, "rms")
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, normalise(x, weight_N, None, eps, "rms", added.contiguous(), total)


def normalise(
    x, weight_N, gate, eps: float, kind: str, added=None, total=None, dtype=None
) -> Tensor:
    """y; fills `total` where something is added."""
    y = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x_RJN, gate_RJN = _rows(x), _rows(gate)
    shape = _shape(x_RJN, gate_RJN, weight_N, kind, added)
    rows = x_RJN.shape[0] * x_RJN.shape[1]
    forward_rows(
        (triton.cdiv(rows, shape["ROWS"]),),
        x_RJN,
        weight_N,
        gate_RJN,
        added,
        total,
        y,
        rows,
        *_strides(x_RJN),
        *_strides(gate_RJN),
        eps,
        **shape,
        num_warps=_warps(shape),
    )
    return y


def gradients(
    x, weight_N, gate, dy, eps: float, kind: str, dtotal=None, dgate=None, y=None
) -> tuple:
    """Of x and the weight (None without); fills `dgate` where there is a gate, and `y`, dense, with
    the output again if it is given. y may be dy, at the cost of half the speed for wide rows."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_RJN, gate_RJN, dy_RJN = _rows(x), _rows(gate), _rows(dy)
    shape = _shape(x_RJN, gate_RJN, weight_N, kind, dtotal)
    rows = x_RJN.shape[0] * x_RJN.shape[1]
    # A multiple of the tile, so that which rows a program sums depends on their number alone.
    strip = triton.cdiv(triton.cdiv(rows, STRIPS), shape["ROWS"]) * shape["ROWS"]
    programs = triton.cdiv(rows, max(strip, 1))
    partial_PN = None
    if weight_N is not None:
        partial_PN = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    if rows:
        backward_rows(
            (programs,),
            x_RJN,
            weight_N,
            gate_RJN,
            dy_RJN,
            dtotal,
            dx,
            dgate,
            y,
            partial_PN,
            rows,
            strip,
            *_strides(x_RJN),
            *_strides(gate_RJN),
            *_strides(_rows(dgate)),
            *_strides(dy_RJN),
            eps,
            **shape,
            AGAIN=y is not None,
            num_warps=_warps(shape),
        )
    dweight_N = None
    if partial_PN is not None:
        dweight_N = partial_PN.sum(0).to(weight_N.dtype)
    return dx, dweight_N


def _rows(x: Tensor | None) -> Tensor | None:
    """[R, J, N] with the last dimension dense: a view where strides allow one."""
    if x is None:
        return None
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    x = x.unsqueeze(-2) if x.dim() == 1 else x
    x = x.unsqueeze(0) if x.dim() == 2 else x
    return x.flatten(0, -3)


def _strides(x_RJN: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x_RJN is None else (x_RJN.stride(0), x_RJN.stride(1))


def _shape(x_RJN: Tensor, gate_RJN, weight_N, kind: str, added) -> dict:
    """What the kernels are compiled for."""
    J, N = x_RJN.shape[1:]
    block = triton.next_power_of_2(N)
    # [rows, N] is one row of J = rows; J of a constant keeps one compilation for all lengths.
    per_group = J if x_RJN.shape[0] > 1 else 0
    return {
        "J": per_group,
        "N": N,
        "BLOCK_N": block,
        "ROWS": max(1, (TILE_ELEMENTS if gate_RJN is None else GATED_TILE_ELEMENTS) // block),
        "KIND": kind,
        "WEIGHTED": weight_N is not None,
        "GATED": gate_RJN is not None,
        "ADDED": added is not None,
    }


def _warps(shape: dict) -> int:
    """Rows that are wider than TILE_ELEMENTS are a tile each."""
    return WARPS if shape["BLOCK_N"] <= TILE_ELEMENTS else 4 if shape["BLOCK_N"] <= 4096 else 8
