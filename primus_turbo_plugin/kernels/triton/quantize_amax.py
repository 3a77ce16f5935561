"""Amax of the rows, the columns or the whole of a bf16 tensor, for FP8 scales that span an axis (Triton).

Math      amax = max |x|, as fp32 bits, so that NaN is above Inf above every number
Layout    x [rows, cols] as words of two columns; a program is 128 rows by TILES x 128 columns
Cost      2 bytes an element, one read; an atomic maximum a row of a program and a column of a tile: memory-bound
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(64)
ROWS, TILES = 128, 4
"""Rows of a program and its tiles of 128 columns: the maxima of its rows stay in registers meanwhile."""


@triton.jit
def amax_words_kernel(
    x_ptr, row_amax, col_amax,
    rows, cols8,
    row_stride16,
    ROW: tl.constexpr, COL: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Folds a program's amax into zeroed int32 `row_amax` and `col_amax`, each `[outer]` or (tensorwise) `[1]`."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    along_rows = tl.zeros((ROWS, WORDS), tl.int32)
    for i in tl.static_range(TILES):
        word = (tl.program_id(0) * TILES + i) * WORDS + tl.arange(0, WORDS)
        place = x_ptr + row.to(tl.int64)[:, None] * (row_stride16 * 4) + word[None, :]
        words = tl.load(place, mask=(row < rows)[:, None] & (word < cols8 * 4)[None, :], other=0)
        low = (words << 16) & 0x7FFF0000
        high = words & 0x7FFF0000
        along_rows = tl.maximum(along_rows, tl.maximum(low, high))
        if COL is not None and COL.block_outer == 1:
            inside = word < cols8 * 4
            tl.atomic_max(col_amax + word * 2, tl.max(low, axis=0), mask=inside, sem="relaxed")
            tl.atomic_max(col_amax + word * 2 + 1, tl.max(high, axis=0), mask=inside, sem="relaxed")
    amax = tl.max(along_rows, axis=1)
    if ROW is not None and ROW.block_outer == 1:
        tl.atomic_max(row_amax + row, amax, mask=row < rows, sem="relaxed")
    if ROW is not None and ROW.block_outer == 0:
        tl.atomic_max(row_amax, tl.max(amax, axis=0), sem="relaxed")
    if COL is not None and COL.block_outer == 0:
        tl.atomic_max(col_amax, tl.max(amax, axis=0), sem="relaxed")
