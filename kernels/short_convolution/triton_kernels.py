"""The convolution and its gradients, a tile of tokens and channels at a time.

    z_t = sum over i < W of w_i x_{t-i} [position_t >= i],   y = z, or z sigmoid(z)

Backward computes z again from x for dz = dy s'(z), rounded to x's dtype, and then

    dx_s = sum over i of w_i dz_{s+i} [position_{s+i} >= i]
    dw_i = sum over s of x_s dz_{s+i} [position_{s+i} >= i]
"""

import triton
import triton.language as tl


@triton.jit
def _weights(weight_EW, channel_E, i: tl.constexpr, W: tl.constexpr, inside_E):
    return tl.load(weight_EW + channel_E * W + i, inside_E, 0.0).to(tl.float32)


@triton.jit
def _convolved(
    x, weight_EW, t_T, position_T, x_row, column_E, channel_E, inside_E, W: tl.constexpr
):
    """z [tokens, channels] fp32; a position of -1 gives zero."""
    z_TE = tl.zeros([t_T.shape[0], column_E.shape[0]], tl.float32)
    for i in tl.static_range(W):
        reaches_TE = ((position_T >= i) & (t_T >= i))[:, None] & inside_E[None, :]
        pointers = x + (t_T - i).to(tl.int64)[:, None] * x_row + column_E[None, :]
        x_TE = tl.load(pointers, reaches_TE, 0.0).to(tl.float32)
        z_TE += x_TE * _weights(weight_EW, channel_E, i, W, inside_E)[None, :]
    return z_TE


@triton.jit
def forward_kernel(
    x,
    weight_EW,
    position_T,
    y,
    T,
    x_row,
    COLUMNS: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """x and y [T, COLUMNS]; column c is channel c mod E."""
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    channel_E, inside_E = column_E % E, column_E < COLUMNS
    positions_T = tl.load(position_T + t_T, t_T < T, -1)
    z_TE = _convolved(x, weight_EW, t_T, positions_T, x_row, column_E, channel_E, inside_E, W)
    if SILU:
        z_TE = z_TE * tl.sigmoid(z_TE)
    pointers = y + t_T.to(tl.int64)[:, None] * COLUMNS + column_E[None, :]
    tl.store(pointers, z_TE.to(y.dtype.element_ty), (t_T < T)[:, None] & inside_E[None, :])


@triton.jit
def slope_kernel(
    x,
    weight_EW,
    position_T,
    dy,
    dz,
    T,
    x_row,
    dy_row,
    COLUMNS: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """dz = dy s'(z) with s(z) = z sigmoid(z); z is computed again from x."""
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    channel_E, inside_E = column_E % E, column_E < COLUMNS
    inside_TE = (t_T < T)[:, None] & inside_E[None, :]
    positions_T = tl.load(position_T + t_T, t_T < T, -1)
    pointers = dy + t_T.to(tl.int64)[:, None] * dy_row + column_E[None, :]
    dy_TE = tl.load(pointers, inside_TE, 0.0).to(tl.float32)
    z_TE = _convolved(x, weight_EW, t_T, positions_T, x_row, column_E, channel_E, inside_E, W)
    sigmoid_TE = tl.sigmoid(z_TE)
    dz_TE = dy_TE * sigmoid_TE * (1 + z_TE * (1 - sigmoid_TE))
    pointers = dz + t_T.to(tl.int64)[:, None] * COLUMNS + column_E[None, :]
    tl.store(pointers, dz_TE.to(dz.dtype.element_ty), inside_TE)


@triton.jit
def backward_kernel(
    x,
    weight_EW,
    position_T,
    dz,
    dx,
    partial_PEW,
    T,
    strip,
    x_row,
    dz_row,
    COLUMNS: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """`strip` tokens of BLOCK_E columns, and their part of the weight's gradient."""
    column_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    channel_E, inside_E = column_E % E, column_E < COLUMNS
    tap_W = tl.arange(0, BLOCK_W)
    dw_WE = tl.zeros([BLOCK_W, BLOCK_E], tl.float32)
    for done in range(0, strip, BLOCK_T):
        s_T = tl.program_id(0) * strip + done + tl.arange(0, BLOCK_T)
        own_TE = (s_T < T)[:, None] & inside_E[None, :]
        pointers = x + s_T.to(tl.int64)[:, None] * x_row + column_E[None, :]
        x_TE = tl.load(pointers, own_TE, 0.0).to(tl.float32)
        dx_TE = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        for i in tl.static_range(W):
            t_T = s_T + i
            reached_T = tl.load(position_T + t_T, t_T < T, -1) >= i
            pointers = dz + t_T.to(tl.int64)[:, None] * dz_row + column_E[None, :]
            mask_TE = reached_T[:, None] & inside_E[None, :]
            dz_TE = tl.load(pointers, mask_TE, 0.0).to(tl.float32)
            dx_TE += dz_TE * _weights(weight_EW, channel_E, i, W, inside_E)[None, :]
            dw_WE += tl.where((tap_W == i)[:, None], tl.sum(dz_TE * x_TE, 0)[None, :], 0.0)
        pointers = dx + s_T.to(tl.int64)[:, None] * COLUMNS + column_E[None, :]
        tl.store(pointers, dx_TE.to(dx.dtype.element_ty), own_TE)
    first = tl.program_id(0).to(tl.int64) * COLUMNS * W
    pointers = partial_PEW + first + column_E[None, :] * W + tap_W[:, None]
    tl.store(pointers, dw_WE, inside_E[None, :] & (tap_W < W)[:, None])
