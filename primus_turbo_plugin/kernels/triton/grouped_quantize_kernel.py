"""Experts' tokens before and while they are quantised along an expert's tokens (Triton).

Layout    x [T, features] by strides, rows sorted by expert; the padded place of an expert's rows starts at a multiple of 32 (FP8:
          128), so that a tile of padded rows belongs to one expert, which its program finds in the offsets
Math      move_apart_kernel: rows to their padded places, zeros in between
          the others: FP8 with a scale for an expert's operand or for a feature of it, read from where the rows are
Cost      move_apart_kernel: 4 bytes an element;  FP8: x read twice, 1 byte written an element and copy
Numerics  same bits as kernels/reference/grouped_quantize.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.quantize_tile import (
    per_element,
    random_words_of_tile,
    rotated,
    scale_of_tile,
    store_codes,
)
from primus_turbo_plugin.kernels.triton.rounding import abs_bits, round_codes


@triton.jit
def _corner_of_tile(col_tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(first row, first column) of this program's tile, of `col_tiles` beside each other. One axis of the grid: CUDA's second
    one ends at 65,535, which 2 million rows need more of.
    """
    tile = tl.program_id(0)
    return tile // col_tiles * ROWS, tile % col_tiles * COLS


@triton.jit
def _group_of_tile(row0, offsets_ptr, padded_ptr, GROUPS: tl.constexpr, SEARCH: tl.constexpr):
    """(group, its row that belongs at the padded row row0, its rows from there on): the last group and none past all groups."""
    index = tl.arange(0, SEARCH)
    ends = tl.load(padded_ptr + 1 + index, mask=index < GROUPS, other=0x7FFFFFFF)
    group = tl.sum((ends <= row0).to(tl.int32), 0)
    last = tl.minimum(group, GROUPS - 1)
    first = tl.load(offsets_ptr + last) + row0 - tl.load(padded_ptr + last)
    count = tl.load(offsets_ptr + last + 1) - first
    return last, first, tl.maximum(count, 0)


@triton.jit
def _load_rows(x_ptr, first, count, col0, features, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """`[ROWS, COLS]` of x from row `first`, zero from row `count` of it on."""
    row, col = tl.arange(0, ROWS), col0 + tl.arange(0, COLS)
    place = x_ptr + (first + row).to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
    return tl.load(place, mask=(row < count)[:, None] & (col < features)[None, :], other=0.0)


@triton.jit
def move_apart_kernel(
    x_ptr, out_ptr, offsets_ptr, padded_ptr,
    features, col_tiles, stride_row, stride_col,
    GROUPS: tl.constexpr, SEARCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out `[padded rows, features]`, contiguous: a program ROWS x COLS of it."""
    row0, col0 = _corner_of_tile(col_tiles, ROWS, COLS)
    _, first, count = _group_of_tile(row0, offsets_ptr, padded_ptr, GROUPS, SEARCH)
    x = _load_rows(x_ptr, first, count, col0, features, stride_row, stride_col, ROWS, COLS)
    row, col = row0 + tl.arange(0, ROWS), col0 + tl.arange(0, COLS)
    place = out_ptr + row.to(tl.int64)[:, None] * features + col[None, :]
    tl.store(place, x, mask=(col < features)[None, :])


@triton.jit
def expert_amax_kernel(
    x_ptr, row_amax, col_amax, row_signs, col_signs, offsets_ptr, padded_ptr,
    features, col_tiles, stride_row, stride_col,
    GROUPS: tl.constexpr, SEARCH: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Amax bits of every expert into zeroed int32 buffers: `[GROUPS]`, of a columnwise copy by feature `[GROUPS, features]`."""
    row0, col0 = _corner_of_tile(col_tiles, ROWS, COLS)
    group, first, count = _group_of_tile(row0, offsets_ptr, padded_ptr, GROUPS, SEARCH)
    x = _load_rows(x_ptr, first, count, col0, features, stride_row, stride_col, ROWS, COLS).to(tl.float32)
    if count > 0:
        if ROW is not None:
            bits = abs_bits(rotated(x, row_signs, ROW))
            tl.atomic_max(row_amax + group, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
        if COL is not None:
            of_feature = tl.max(abs_bits(rotated(tl.trans(x), col_signs, COL)), axis=1)
            if COL.block_outer == 1:
                col = col0 + tl.arange(0, COLS)
                place = col_amax + group.to(tl.int64) * features + col
                tl.atomic_max(place, of_feature, mask=col < features, sem="relaxed")
            else:
                tl.atomic_max(col_amax + group, tl.max(of_feature, axis=0), sem="relaxed")


@triton.jit
def _codes(v, scale, outer0, contraction0, padded, k0, k1, c2, c3, META: tl.constexpr):
    """Codes of a rotated tile `[outer, contraction]`, divided by scales that broadcast to it."""
    wide = per_element(scale, v.shape[0], v.shape[1])
    words = None
    if META.stochastic:
        words = random_words_of_tile(outer0, contraction0, padded, k0, k1, c2, c3, v.shape[0], v.shape[1])
    valid = wide == wide
    return tl.where(valid, round_codes(tl.where(valid, tl.div_rn(v, wide), 0.0), words, META), 0)


_KEY_WORDS = ("row_k0", "row_k1", "row_c2", "row_c3", "col_k0", "col_k1", "col_c2", "col_c3")


@triton.jit(do_not_specialize=_KEY_WORDS)
def expert_fp8_kernel(
    x_ptr, row_data, row_scale, row_amax, row_signs, col_data, col_scale, col_amax, col_signs, offsets_ptr, padded_ptr,
    features, padded_rows, row_padded, col_tiles, stride_row, stride_col,
    row_k0, row_k1, row_c2, row_c3, col_k0, col_k1, col_c2, col_c3,
    GROUPS: tl.constexpr, SEARCH: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Both copies of a tile: codes `[T, row_padded]` with a scale a row, `[features, padded_rows]` with one for ROWS tokens."""
    row0, col0 = _corner_of_tile(col_tiles, ROWS, COLS)
    group, first, count = _group_of_tile(row0, offsets_ptr, padded_ptr, GROUPS, SEARCH)
    x = _load_rows(x_ptr, first, count, col0, features, stride_row, stride_col, ROWS, COLS).to(tl.float32)
    if ROW is not None:
        v = rotated(x, row_signs, ROW)
        scale = scale_of_tile(abs_bits(v), row_amax + group, 0, 1, ROW)
        codes = _codes(v, scale, first, col0, row_padded, row_k0, row_k1, row_c2, row_c3, ROW)
        store_codes(codes, row_data, first, col0, first + count, row_padded, ROW)
        row = tl.arange(0, ROWS)
        every = tl.reshape(tl.broadcast_to(scale, (ROWS, 1)), (ROWS,))
        tl.store(row_scale + first + row, every, mask=(row < count) & (col0 == 0))
    if COL is not None:
        v = rotated(tl.trans(x), col_signs, COL)
        amax = col_amax + group.to(tl.int64) * (features if COL.block_outer == 1 else 1)
        scale = scale_of_tile(abs_bits(v), amax, col0, features, COL)
        codes = _codes(v, scale, col0, row0, padded_rows, col_k0, col_k1, col_c2, col_c3, COL)
        store_codes(codes, col_data, col0, row0, features, padded_rows, COL)
        col = col0 + tl.arange(0, COLS)
        every = tl.reshape(tl.broadcast_to(scale, (COLS, 1)), (COLS,))
        place = col_scale + col.to(tl.int64) * (padded_rows // ROWS) + row0 // ROWS
        tl.store(place, every, mask=col < features)
