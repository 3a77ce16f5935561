"""RMS norm and layer norm, forward and backward (Triton device code; `norm.py` launches it).

Math      as kernels/reference/norm.py
Layout    x, y, dy, dx [rows, hidden], columns and rows at any distance in what is read;  mean, rstd [rows] fp32;
          partial sums of the weight's and the bias's gradient [2 or 1, programs, hidden] fp32
          whole rows: a program holds ROWS rows of 2^LOG >= hidden columns in registers, and reads them once
          rows in chunks: a program walks over a row, 2^LOG columns at a time, once for each thing it must know first
Cost      memory-bound: forward reads and writes a row, backward reads two and writes one. Where registers hold sums of columns
          beside whole rows, the same reads give the gradients of the parameters; else `norm_weight_kernel` reads both again
Numerics  fp32; RMS norm's forward has the reference's bits: squares are added in the order of `precision.tree_sum`, quotient and
          root are correctly rounded (compile with enable_fp_fusion=False). Gradients of the parameters are sums in an order that
          depends on the number of programs only: the same bits every run
"""

from __future__ import annotations

import triton
import triton.language as tl

SUM_COLS, SUM_ROWS = 32, 32
"""Tile of `sum_parts_kernel`."""


@triton.jit
def _load_raw(ptr, row, col, stride_row, stride_col, rows, hidden):
    """`[rows of the program, columns]` in ptr's dtype, zero outside."""
    place = ptr + row.to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
    return tl.load(place, mask=(row < rows)[:, None] & (col < hidden)[None, :], other=0.0)


@triton.jit
def _load_rows(ptr, row, col, stride_row, stride_col, rows, hidden):
    """The same in fp32."""
    return _load_raw(ptr, row, col, stride_row, stride_col, rows, hidden).to(tl.float32)


@triton.jit
def _store_rows(value, ptr, row, col, rows, hidden):
    """Round to ptr's dtype and store into contiguous rows."""
    place = ptr + row.to(tl.int64)[:, None] * hidden + col[None, :]
    tl.store(place, value.to(ptr.dtype.element_ty), mask=(row < rows)[:, None] & (col < hidden)[None, :])


@triton.jit
def _gamma(ptr, col, hidden, ZERO_CENTERED: tl.constexpr):
    """gamma `[1, columns]`, fp32."""
    gamma = tl.load(ptr + col, mask=col < hidden, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gamma = gamma + 1.0
    return gamma[None, :]


@triton.jit
def _tree(t, LOG: tl.constexpr):
    """`[rows, 2^LOG]` to `[rows]` by pairs of neighbours. Two numbers have one sum, so a reduction over pairs has no order."""
    for i in tl.static_range(LOG):
        t = tl.sum(tl.reshape(t, (t.shape[0], 1 << (LOG - i - 1), 2)), axis=2)
    return tl.reshape(t, (t.shape[0],))


@triton.jit
def _centred(x, mean, col, hidden):
    """x - mean inside the row, zero outside."""
    return tl.where((col < hidden)[None, :], x - mean[:, None], 0.0)


@triton.jit
def _normed(x, mean, rstd, gamma, bias_ptr, col, hidden, RMS: tl.constexpr, BIAS: tl.constexpr):
    """y of some columns, fp32."""
    if not RMS:
        x = x - mean[:, None]
    y = x * rstd[:, None] * gamma
    if BIAS:
        y = y + tl.load(bias_ptr + col, mask=col < hidden, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def norm_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    rows, hidden,
    stride_row, stride_col,
    eps,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """y and the statistics of ROWS whole rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, 1 << LOG)
    x = _load_rows(x_ptr, row, col, stride_row, stride_col, rows, hidden)
    width = hidden + 0.0
    mean = None
    if RMS:
        square = _tree(x * x, LOG)
    else:
        mean = tl.sum(x, axis=1) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
        centred = _centred(x, mean, col, hidden)
        square = tl.sum(centred * centred, axis=1)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, width) + eps))
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    gamma = _gamma(weight_ptr, col, hidden, ZERO_CENTERED)
    y = _normed(x, mean, rstd, gamma, bias_ptr, col, hidden, RMS, BIAS)
    _store_rows(y, y_ptr, row, col, rows, hidden)


@triton.jit
def norm_fwd_chunks_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    rows, hidden,
    stride_row, stride_col,
    eps,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, BIAS: tl.constexpr, LOG: tl.constexpr, LOG_CHUNKS: tl.constexpr,
):  # fmt: skip
    """y and the statistics of one row, 2^LOG columns at a time; 2^LOG_CHUNKS such chunks hold a row."""
    BLOCK: tl.constexpr = 1 << LOG
    row = tl.program_id(0) + tl.arange(0, 1)
    chunk = tl.arange(0, 1 << LOG_CHUNKS)
    width = hidden + 0.0
    mean = tl.zeros((1,), tl.float32)
    if not RMS:
        for first in range(0, hidden, BLOCK):
            col = first + tl.arange(0, BLOCK)
            mean += tl.sum(_load_rows(x_ptr, row, col, stride_row, stride_col, rows, hidden), axis=1)
        mean = mean / width
        tl.store(mean_ptr + row, mean)
    squares = tl.zeros((1, 1 << LOG_CHUNKS), tl.float32)
    for first in range(0, hidden, BLOCK):
        col = first + tl.arange(0, BLOCK)
        x = _load_rows(x_ptr, row, col, stride_row, stride_col, rows, hidden)
        if not RMS:
            x = _centred(x, mean, col, hidden)
        squares = tl.where((chunk == first // BLOCK)[None, :], _tree(x * x, LOG)[:, None], squares)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(_tree(squares, LOG_CHUNKS), width) + eps))
    tl.store(rstd_ptr + row, rstd)
    for first in range(0, hidden, BLOCK):
        col = first + tl.arange(0, BLOCK)
        x = _load_rows(x_ptr, row, col, stride_row, stride_col, rows, hidden)
        gamma = _gamma(weight_ptr, col, hidden, ZERO_CENTERED)
        y = _normed(x, mean, rstd, gamma, bias_ptr, col, hidden, RMS, BIAS)
        _store_rows(y, y_ptr, row, col, rows, hidden)


@triton.jit
def _x_hat(x, mean_ptr, row, rows, rstd, col, hidden, RMS: tl.constexpr):
    """The normed x before gamma, zero outside."""
    if not RMS:
        x = _centred(x, tl.load(mean_ptr + row, mask=row < rows, other=0.0), col, hidden)
    return x * rstd[:, None]


@triton.jit
def _dx(
    g, x_hat, rstd, g_mean, projection, res_ptr, row, col, res_row, res_col, rows, hidden,
    RMS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Gradient of x, with the residual branch's if there is one, fp32."""
    if not RMS:
        g = g - g_mean[:, None]
    dx = rstd[:, None] * (g - x_hat * projection[:, None])
    if RESIDUAL:
        dx = dx + _load_rows(res_ptr, row, col, res_row, res_col, rows, hidden)
    return dx


@triton.jit
def _store_sums(dweight, dbias, parts_ptr, program, programs, col, hidden, RMS: tl.constexpr):
    """A program's part of the sums over tokens."""
    place = parts_ptr + program.to(tl.int64) * hidden + col
    tl.store(place, tl.sum(dweight, axis=0), mask=col < hidden)
    if not RMS:
        tl.store(place + programs.to(tl.int64) * hidden, tl.sum(dbias, axis=0), mask=col < hidden)


@triton.jit
def norm_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, res_ptr, dx_ptr, parts_ptr,
    rows, hidden,
    dy_row, dy_col, x_row, x_col, res_row, res_col,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """dx of every so many-th ROWS whole rows; with SUMS their sums for the gradients of weight and (layer norm) bias."""
    col = tl.arange(0, 1 << LOG)
    width = hidden + 0.0
    gamma = _gamma(weight_ptr, col, hidden, ZERO_CENTERED)
    dweight = tl.zeros((ROWS, 1 << LOG), tl.float32)
    dbias = tl.zeros((ROWS, 1 << LOG), tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x_next = _load_raw(x_ptr, row, col, x_row, x_col, rows, hidden)
    dy_next = _load_raw(dy_ptr, row, col, dy_row, dy_col, rows, hidden)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        x = x_next.to(tl.float32)
        dy = dy_next.to(tl.float32)
        if SUMS:  # the next rows are on their way while these are computed
            later = row + tl.num_programs(0) * ROWS
            x_next = _load_raw(x_ptr, later, col, x_row, x_col, rows, hidden)
            dy_next = _load_raw(dy_ptr, later, col, dy_row, dy_col, rows, hidden)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        x_hat = _x_hat(x, mean_ptr, row, rows, rstd, col, hidden, RMS)
        g = dy * gamma
        projection = tl.sum(g * x_hat, axis=1) / width
        g_mean = None
        if not RMS:
            g_mean = tl.sum(g, axis=1) / width
        dx = _dx(g, x_hat, rstd, g_mean, projection, res_ptr, row, col, res_row, res_col, rows, hidden, RMS, RESIDUAL)
        _store_rows(dx, dx_ptr, row, col, rows, hidden)
        if SUMS:
            dweight += dy * x_hat
            if not RMS:
                dbias += dy
    if SUMS:
        _store_sums(dweight, dbias, parts_ptr, tl.program_id(0), tl.num_programs(0), col, hidden, RMS)


@triton.jit
def norm_bwd_chunks_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, res_ptr, dx_ptr,
    rows, hidden,
    dy_row, dy_col, x_row, x_col, res_row, res_col,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """dx of one row, 2^LOG columns at a time."""
    BLOCK: tl.constexpr = 1 << LOG
    row = tl.program_id(0) + tl.arange(0, 1)
    width = hidden + 0.0
    rstd = tl.load(rstd_ptr + row)
    projection = tl.zeros((1,), tl.float32)
    g_mean = tl.zeros((1,), tl.float32)
    for first in range(0, hidden, BLOCK):
        col = first + tl.arange(0, BLOCK)
        x = _load_rows(x_ptr, row, col, x_row, x_col, rows, hidden)
        x_hat = _x_hat(x, mean_ptr, row, rows, rstd, col, hidden, RMS)
        g = _load_rows(dy_ptr, row, col, dy_row, dy_col, rows, hidden) * _gamma(weight_ptr, col, hidden, ZERO_CENTERED)
        projection += tl.sum(g * x_hat, axis=1)
        g_mean += tl.sum(g, axis=1)
    projection = projection / width
    g_mean = g_mean / width
    for first in range(0, hidden, BLOCK):
        col = first + tl.arange(0, BLOCK)
        x = _load_rows(x_ptr, row, col, x_row, x_col, rows, hidden)
        x_hat = _x_hat(x, mean_ptr, row, rows, rstd, col, hidden, RMS)
        g = _load_rows(dy_ptr, row, col, dy_row, dy_col, rows, hidden) * _gamma(weight_ptr, col, hidden, ZERO_CENTERED)
        dx = _dx(g, x_hat, rstd, g_mean, projection, res_ptr, row, col, res_row, res_col, rows, hidden, RMS, RESIDUAL)
        _store_rows(dx, dx_ptr, row, col, rows, hidden)


@triton.jit
def norm_weight_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, parts_ptr,
    rows, hidden,
    dy_row, dy_col, x_row, x_col,
    RMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sums over every so many-th ROWS rows of COLS columns, for the gradients of weight and (layer norm) bias."""
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    dweight = tl.zeros((ROWS, COLS), tl.float32)
    dbias = tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        dy = _load_rows(dy_ptr, row, col, dy_row, dy_col, rows, hidden)
        x = _load_rows(x_ptr, row, col, x_row, x_col, rows, hidden)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        dweight += dy * _x_hat(x, mean_ptr, row, rows, rstd, col, hidden, RMS)
        if not RMS:
            dbias += dy
    _store_sums(dweight, dbias, parts_ptr, tl.program_id(0), tl.num_programs(0), col, hidden, RMS)


@triton.jit
def sum_parts_kernel(parts_ptr, out_ptr, count, hidden, ROWS: tl.constexpr, COLS: tl.constexpr):
    """fp32 `[sums, count, hidden]` to `[sums, hidden]`."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    which = tl.program_id(1).to(tl.int64)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, count, ROWS):
        part = first + tl.arange(0, ROWS)
        inside = (part < count)[:, None] & (col < hidden)[None, :]
        total += tl.load(
            parts_ptr + (which * count + part.to(tl.int64))[:, None] * hidden + col[None, :], mask=inside, other=0.0
        )
    tl.store(out_ptr + which * hidden + col, tl.sum(total, axis=0), mask=col < hidden)
