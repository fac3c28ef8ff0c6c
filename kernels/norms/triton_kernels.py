"""RMSNorm with an optional SiLU gate, and L2 normalisation: a tile of whole rows at a time.

    x^ = r x,   r = (mean(x^2) + eps)^-1/2, or 1 / max(|x|, eps)
    y = x^ w s(z),   s(z) = z sigmoid(z)

Backward computes r again from x. With n = dy w s(z):

    dx = r (n - x^ mean(n x^)), or r (n - x^ sum(n x^))
    dw = sum over rows of dy s(z) x^,   dz = dy x^ w s'(z)

With something to add, x is x + added, rounded to its dtype and written to `total`; backward adds
the gradient that reaches `total` from elsewhere to dx, which is that of both terms.

Backward writes y again if it is asked to, by forward's operations in their order; dy may lie there.
"""

import triton
import triton.language as tl


@triton.jit
def _base(row_R, group_stride, row_stride, J: tl.constexpr):
    """Where rows begin: row g J + j of the tensor [groups, J, N]; J = 0 is one group of all."""
    if J == 0:
        return row_R.to(tl.int64) * row_stride
    return (row_R // J).to(tl.int64) * group_stride + (row_R % J) * row_stride


@triton.jit
def _inverse_norm(x_RN, eps, N: tl.constexpr, KIND: tl.constexpr):
    square_R = tl.sum(x_RN * x_RN, 1)
    if KIND == "rms":
        return 1 / tl.sqrt(square_R / N + eps)
    return 1 / tl.maximum(tl.sqrt(square_R), eps)


@triton.jit
def norm_forward_kernel(
    x,
    weight,
    gate,
    added,
    total,
    y,
    rows,
    x_group,
    x_row,
    gate_group,
    gate_row,
    eps,
    J: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_N = tl.arange(0, BLOCK_N)
    inside_RN = (row_R < rows)[:, None] & (column_N < N)[None, :]
    pointers = x + _base(row_R, x_group, x_row, J)[:, None] + column_N[None, :]
    x_RN = tl.load(pointers, inside_RN, 0.0).to(tl.float32)
    dense = row_R.to(tl.int64)[:, None] * N + column_N[None, :]
    if ADDED:
        x_RN += tl.load(added + dense, inside_RN, 0.0).to(tl.float32)
        total_RN = x_RN.to(total.dtype.element_ty)
        tl.store(total + dense, total_RN, inside_RN)
        x_RN = total_RN.to(tl.float32)
    y_RN = x_RN * _inverse_norm(x_RN, eps, N, KIND)[:, None]
    if WEIGHTED:
        w_N = tl.load(weight + column_N, column_N < N, 0.0).to(tl.float32)
        y_RN = y_RN * w_N[None, :]
    if GATED:
        pointers = gate + _base(row_R, gate_group, gate_row, J)[:, None] + column_N[None, :]
        z_RN = tl.load(pointers, inside_RN, 0.0).to(tl.float32)
        y_RN = y_RN * z_RN * tl.sigmoid(z_RN)
    tl.store(y + dense, y_RN.to(y.dtype.element_ty), inside_RN)


@triton.jit
def norm_backward_kernel(
    x,
    weight,
    gate,
    dy,
    dtotal,
    dx,
    dgate,
    y,
    partial_PN,
    rows,
    strip,
    x_group,
    x_row,
    gate_group,
    gate_row,
    dgate_group,
    dgate_row,
    dy_group,
    dy_row,
    eps,
    J: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """`strip` rows; their part of the weight's gradient into the program's row of partial_PN."""
    column_N = tl.arange(0, BLOCK_N)
    first = tl.program_id(0) * strip
    w_N = tl.full([BLOCK_N], 1.0, tl.float32)
    if WEIGHTED:
        w_N = tl.load(weight + column_N, column_N < N, 0.0).to(tl.float32)
    dw_N = tl.zeros([BLOCK_N], tl.float32)
    for done in range(0, strip, ROWS):
        row_R = first + done + tl.arange(0, ROWS)
        inside_RN = (row_R < rows)[:, None] & (column_N < N)[None, :]
        pointers = x + _base(row_R, x_group, x_row, J)[:, None] + column_N[None, :]
        x_RN = tl.load(pointers, inside_RN, 0.0).to(tl.float32)
        pointers = dy + _base(row_R, dy_group, dy_row, J)[:, None] + column_N[None, :]
        dy_RN = tl.load(pointers, inside_RN, 0.0).to(tl.float32)
        r_R = _inverse_norm(x_RN, eps, N, KIND)
        unit_RN = x_RN * r_R[:, None]
        out = row_R.to(tl.int64)[:, None] * N + column_N[None, :]
        y_RN = unit_RN
        if WEIGHTED:
            y_RN = y_RN * w_N[None, :]
        if GATED:
            pointers = gate + _base(row_R, gate_group, gate_row, J)[:, None] + column_N[None, :]
            z_RN = tl.load(pointers, inside_RN, 0.0).to(tl.float32)
            sigmoid_RN = tl.sigmoid(z_RN)
            y_RN = y_RN * z_RN * sigmoid_RN
        if AGAIN:
            tl.store(y + out, y_RN.to(y.dtype.element_ty), inside_RN)
        if GATED:
            slope_RN = sigmoid_RN * (1 + z_RN * (1 - sigmoid_RN))
            dz_RN = dy_RN * unit_RN * w_N[None, :] * slope_RN
            own = _base(row_R, dgate_group, dgate_row, J)[:, None] + column_N[None, :]
            tl.store(dgate + own, dz_RN.to(dgate.dtype.element_ty), inside_RN)
            dy_RN = dy_RN * z_RN * sigmoid_RN
        if WEIGHTED:
            dw_N += tl.sum(dy_RN * unit_RN, 0)
            dy_RN = dy_RN * w_N[None, :]
        along_R = tl.sum(dy_RN * unit_RN, 1)
        if KIND == "rms":
            along_R = along_R / N
        else:
            # A row shorter than eps is divided by a constant.
            along_R = tl.where(r_R * eps < 1, along_R, 0.0)
        dx_RN = r_R[:, None] * (dy_RN - unit_RN * along_R[:, None])
        if ADDED:
            dx_RN += tl.load(dtotal + out, inside_RN, 0.0).to(tl.float32)
        tl.store(dx + out, dx_RN.to(dx.dtype.element_ty), inside_RN)
    if WEIGHTED:
        tl.store(partial_PN + tl.program_id(0) * N + column_N, dw_N, column_N < N)
