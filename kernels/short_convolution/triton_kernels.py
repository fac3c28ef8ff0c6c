"""The convolution and its gradients, a tile of tokens and channels at a time.

    z_t = sum over i < W of w_i x_{t-i} [position_t >= i],   y = z, or z sigmoid(z)

Backward computes z again from x for dz = dy s'(z), and then

    dx_s = sum over i of w_i dz_{s+i} [position_{s+i} >= i]
    dw_i = sum over s of x_s dz_{s+i} [position_{s+i} >= i]
"""

# A jit function's result looks like that of the compiler's stub.
# pyright: reportGeneralTypeIssues=false
# Triton adds tuples and does not unpack them.
# ruff: noqa: RUF005

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
def _part(column, END_0: tl.constexpr, END_1: tl.constexpr, COLUMNS: tl.constexpr):
    """Of the part that a column lies in: its number, first column and width."""
    number = tl.where(column >= END_0, 1, 0) + tl.where(column >= END_1, 1, 0)
    start = tl.where(column >= END_1, END_1, tl.where(column >= END_0, END_0, 0))
    width = tl.where(column >= END_0, END_1 - END_0, END_0)
    width = tl.where(column >= END_1, COLUMNS - END_1, width)
    return number, start, width


@triton.jit
def convolution_forward_kernel(
    x,
    weight_EW,
    position_T,
    y_0,
    y_1,
    y_2,
    T,
    x_row,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    COLUMNS: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """x [T, COLUMNS], column c is channel c mod E; y_0, y_1 and y_2 are its parts, dense."""
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * BLOCK_E
    column_E = first + tl.arange(0, BLOCK_E)
    channel_E, inside_E = column_E % E, column_E < COLUMNS
    positions_T = tl.load(position_T + t_T, t_T < T, -1)
    z_TE = _convolved(x, weight_EW, t_T, positions_T, x_row, column_E, channel_E, inside_E, W)
    if SILU:
        z_TE = z_TE * tl.sigmoid(z_TE)
    number, start, width = _part(first, END_0, END_1, COLUMNS)
    own_TE = t_T.to(tl.int64)[:, None] * width + (column_E - start)[None, :]
    y_TE, inside_TE = z_TE.to(y_0.dtype.element_ty), (t_T < T)[:, None] & inside_E[None, :]
    tl.store(y_0 + own_TE, y_TE, inside_TE & (number == 0))
    tl.store(y_1 + own_TE, y_TE, inside_TE & (number == 1))
    tl.store(y_2 + own_TE, y_TE, inside_TE & (number == 2))


@triton.jit
def convolution_backward_kernel(
    x,
    weight_EW,
    position_T,
    dy_0,
    dy_1,
    dy_2,
    dx,
    partial_PEW,
    T,
    strip,
    x_row,
    dx_row,
    dy_row_0,
    dy_row_1,
    dy_row_2,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    COLUMNS: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A walk over `strip` tokens of BLOCK_E columns, and W - 1 tokens on: dx of the strip's tokens
    and their part of dw.

    At token t the last W inputs of its document and the unfinished dx of their tokens are in
    registers, the newest one first; each row of x and dy is read once, one token ahead.
    """
    start = tl.program_id(0) * strip
    first = tl.program_id(1) * BLOCK_E
    column_E = first + tl.arange(0, BLOCK_E)
    channel_E, inside_E = column_E % E, column_E < COLUMNS
    number, part_start, _ = _part(first, END_0, END_1, COLUMNS)
    dy = tl.where(number == 2, dy_2, tl.where(number == 1, dy_1, dy_0))
    dy_row = tl.where(number == 2, dy_row_2, tl.where(number == 1, dy_row_1, dy_row_0))
    x += column_E
    dx += column_E
    dy += first - part_start + tl.arange(0, BLOCK_E)
    zero_E = tl.zeros([BLOCK_E], tl.float32)
    before = tl.load(position_T + tl.maximum(start - 1, 0))
    w_WE, x_WE, dx_WE, dw_WE = (), (), (), ()
    for i in tl.static_range(W):
        w_WE += (_weights(weight_EW, channel_E, i, W, inside_E),)
        x_WE += (_row(x, start - 1 - i, x_row, T, inside_E & (before >= i)).to(tl.float32),)
        dx_WE += (zero_E,)
        dw_WE += (zero_E,)
    x_E = _row(x, start, x_row, T, inside_E)
    dy_E = _row(dy, start, dy_row, T, inside_E)
    for t in range(start, start + strip + W - 1):
        position = tl.load(position_T + t, t < T, -1)
        earlier = ()
        for i in tl.static_range(W - 1):
            earlier += (tl.where(position == 0, 0.0, x_WE[i]),)
        x_WE = (x_E.to(tl.float32),) + earlier
        dz_E = dy_E.to(tl.float32)
        x_E = _row(x, t + 1, x_row, T, inside_E)
        dy_E = _row(dy, t + 1, dy_row, T, inside_E)
        if SILU:
            z_E = w_WE[0] * x_WE[0]
            for i in tl.static_range(1, W):
                z_E += w_WE[i] * x_WE[i]
            sigmoid_E = tl.sigmoid(z_E)
            dz_E = dz_E * sigmoid_E * (1 + z_E * (1 - sigmoid_E))
        own_dz_E = tl.where(t < start + strip, dz_E, 0.0)
        finished, reached, summed = (), dx_WE, ()
        for i in tl.static_range(W):
            finished += (reached[i] + w_WE[i] * tl.where(position >= i, dz_E, 0.0),)
            summed += (dw_WE[i] + x_WE[i] * own_dz_E,)
        dw_WE = summed
        done = t - (W - 1)
        stored_E = inside_E & (done >= start) & (done < T)
        dx_E = finished[W - 1].to(dx.dtype.element_ty)
        tl.store(dx + tl.maximum(done, 0).to(tl.int64) * dx_row, dx_E, stored_E)
        dx_WE = (zero_E,) + finished[: W - 1]
    first_part = partial_PEW + tl.program_id(0).to(tl.int64) * COLUMNS * W + column_E * W
    for i in tl.static_range(W):
        tl.store(first_part + i, dw_WE[i], inside_E)


@triton.jit
def _row(columns, t, row, T, inside_E):
    """A token's columns; zeros beyond the stream."""
    exists = (t >= 0) & (t < T)
    return tl.load(columns + tl.maximum(t, 0).to(tl.int64) * row, inside_E & exists, 0.0)
