"""Sums in the order of `precision.tree_sum`: 1 / RMS of every row, and sums of fp32 rows (Triton).

Math      rstd = 1 / sqrt(tree_sum(x^2) / hidden + eps);   out[i] = tree_sum of 128 rows of a partial sum
Cost      rstd reads x once, 2 bytes an element; row sums read 1/32 of what was quantised, in fp32
Numerics  a reduction over pairs adds two numbers, whose order does not matter: log2(n) such steps are the tree.
          Multiplications and additions are not fused (compile with enable_fp_fusion=False); division and square root are
          correctly rounded
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 128
"""Rows summed by one program of `sum_rows_kernel`: a power of two, so that sums of its results are the same tree."""
_CHUNK = tl.constexpr(CHUNK)
SUM_COLS = 64
_SUM_COLS = tl.constexpr(SUM_COLS)


@triton.jit
def rstd_kernel(x_ptr, rstd_ptr, rows, hidden, stride, eps, ROWS: tl.constexpr, LOG_HIDDEN: tl.constexpr):
    """rstd of ROWS rows of bf16; 2^LOG_HIDDEN >= hidden."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, 1 << LOG_HIDDEN)
    inside = (row < rows)[:, None] & (col < hidden)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    total = x * x
    for i in tl.static_range(LOG_HIDDEN):
        total = tl.sum(tl.reshape(total, (ROWS, 1 << (LOG_HIDDEN - i - 1), 2)), axis=2)
    mean = tl.div_rn(tl.reshape(total, (ROWS,)), hidden.to(tl.float32))
    tl.store(rstd_ptr + row, tl.div_rn(1.0, tl.sqrt_rn(mean + eps)), mask=row < rows)


@triton.jit
def sum_rows_kernel(x_ptr, out_ptr, rows, cols):
    """Sums of 128 rows at a time of fp32 `[rows, cols]` into `[ceil(rows / 128), cols]`."""
    row = tl.program_id(0) * _CHUNK + tl.arange(0, _CHUNK)
    col = tl.program_id(1) * _SUM_COLS + tl.arange(0, _SUM_COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    total = tl.load(x_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], mask=inside, other=0.0)
    for i in tl.static_range(7):
        total = tl.sum(tl.reshape(total, (64 >> i, 2, _SUM_COLS)), axis=1)
    out = tl.reshape(total, (_SUM_COLS,))
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * cols + col, out, mask=col < cols)
