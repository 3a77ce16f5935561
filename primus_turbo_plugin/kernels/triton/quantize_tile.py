"""Quantise a tile into its rowwise and its columnwise copy in one pass (Triton): every spec, dtype, stride and tail.

Math      as kernels/reference/quantize.py: rotate, scale, round
Layout    x [rows, cols] by strides;  rowwise [rows, padded cols], columnwise [cols, padded rows], FP4 two codes a byte;
          one program a BLOCK_M x BLOCK_N tile, which holds whole blocks and whole rotations of both copies
Cost      x is read once whatever the number of copies; a scale that spans an axis (FP8 tensorwise, rowwise) costs one more read
Numerics  fp32 inside; same bits as the reference
Limits    the portable kernel: quantize_mxfp4_bf16.py is the fast one for the case that training spends its time in
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.rotation import rotate_tile
from primus_turbo_plugin.kernels.triton.rounding import (
    abs_bits,
    fp8_block_scale,
    mx_reciprocal,
    mx_scale_byte,
    philox_words4,
    round_codes,
)


@triton.jit
def _load(x_ptr, rows, cols, stride_row, stride_col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's tile of x, fp32, zero outside x."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offset = row.to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
    x = tl.load(x_ptr + offset, mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def rotated(v, signs_ptr, META: tl.constexpr):
    """A tile `[outer, contraction]` rotated as the copy's spec says."""
    if META.hadamard:
        v = rotate_tile(v, signs_ptr, META.hadamard, META.log2_hadamard, META.rotation_factor)
    return v


@triton.jit
def _amax_of_copy(v, signs_ptr, amax_ptr, outer0, outer_size, META: tl.constexpr):
    """Fold the tile's amax (as bits) into amax_ptr, `[outer]` or `[1]`."""
    bits = abs_bits(rotated(v, signs_ptr, META))
    row_amax = tl.max(bits, axis=1)
    if META.block_outer == 1:
        outer = outer0 + tl.arange(0, v.shape[0])
        tl.atomic_max(amax_ptr + outer, row_amax, mask=outer < outer_size, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr, tl.max(row_amax, axis=0), sem="relaxed")


@triton.jit
def _block_amax(bits, META: tl.constexpr):
    """`[outer blocks, contraction blocks]` of a tile."""
    outer: tl.constexpr = bits.shape[0] // META.block_outer
    width: tl.constexpr = bits.shape[1] // META.block_contraction
    amax = tl.max(tl.reshape(bits, (bits.shape[0], width, META.block_contraction)), axis=2)
    if META.block_outer > 1:
        amax = tl.max(tl.reshape(amax, (outer, META.block_outer, width)), axis=1)
    return amax


@triton.jit
def per_element(scale, outer: tl.constexpr, contraction: tl.constexpr):
    """Repeat `[outer blocks, contraction blocks]` over the elements of a tile."""
    rows: tl.constexpr = scale.shape[0]
    cols: tl.constexpr = scale.shape[1]
    shape: tl.constexpr = (rows, outer // rows, cols, contraction // cols)
    return tl.reshape(tl.broadcast_to(scale[:, None, :, None], shape), (outer, contraction))


@triton.jit
def scale_of_tile(bits, amax_ptr, outer0, outer_size, META: tl.constexpr):
    """The tile's scales as stored: E8M0 bytes or fp32, `[outer blocks, contraction blocks]`."""
    if META.block_contraction == 0:
        if META.block_outer == 1:
            outer = outer0 + tl.arange(0, bits.shape[0])
            amax = tl.load(amax_ptr + outer, mask=outer < outer_size, other=0)[:, None]
        else:
            amax = tl.load(amax_ptr + tl.arange(0, 1))[:, None]
        scale = fp8_block_scale(amax, META)
    elif META.is_mx:
        scale = mx_scale_byte(_block_amax(bits, META), META)
    else:
        scale = fp8_block_scale(_block_amax(bits, META), META)
    return scale


@triton.jit
def random_words_of_tile(outer0, contraction0, padded, k0, k1, c2, c3, OUTER: tl.constexpr, CONTRACTION: tl.constexpr):
    """Random bits of a tile's elements, by their places in the copy."""
    outer = outer0.to(tl.int64) + tl.arange(0, OUTER)
    group = contraction0 // 4 + tl.arange(0, CONTRACTION // 4)
    counter = outer[:, None] * ((padded + 3) // 4) + group[None, :]
    return tl.reshape(philox_words4(counter, k0, k1, c2, c3), (OUTER, CONTRACTION))


@triton.jit
def store_codes(codes, data_ptr, outer0, contraction0, outer_size, padded, META: tl.constexpr):
    """Pack a tile's codes and store those inside the copy."""
    outer = outer0 + tl.arange(0, codes.shape[0])
    width: tl.constexpr = codes.shape[1] // META.codes_per_byte
    if META.codes_per_byte == 2:
        low, high = tl.split(tl.reshape(codes, (codes.shape[0], width, 2)))
        codes = low | (high << 4)
    byte = contraction0 // META.codes_per_byte + tl.arange(0, width)
    row_bytes = padded // META.codes_per_byte
    place = data_ptr + outer.to(tl.int64)[:, None] * row_bytes + byte[None, :]
    tl.store(place, codes.to(tl.uint8), mask=(outer < outer_size)[:, None] & (byte < row_bytes)[None, :])


@triton.jit
def _store_scale(scale, scale_ptr, outer0, contraction0, outer_size, padded, META: tl.constexpr):
    if META.block_contraction == 0:
        if contraction0 == 0:
            if META.block_outer == 1:
                outer = outer0 + tl.arange(0, scale.shape[0])[:, None]
                tl.store(scale_ptr + outer, scale, mask=outer < outer_size)
            elif outer0 == 0:
                tl.store(scale_ptr + tl.arange(0, 1)[:, None], scale)
    else:
        row = outer0 // META.block_outer + tl.arange(0, scale.shape[0])
        col = contraction0 // META.block_contraction + tl.arange(0, scale.shape[1])
        row_scales = padded // META.block_contraction
        mask = (row * META.block_outer < outer_size)[:, None] & (col < row_scales)[None, :]
        place = scale_ptr + row.to(tl.int64)[:, None] * row_scales + col[None, :]
        tl.store(place, scale.to(scale_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_copy(
    v, signs_ptr, data_ptr, scale_ptr, amax_ptr, outer0, contraction0, outer_size, padded, k0, k1, c2, c3, META: tl.constexpr
):  # fmt: skip
    """Quantise one orientation `[outer, contraction]` of the tile."""
    v = rotated(v, signs_ptr, META)
    scale = scale_of_tile(abs_bits(v), amax_ptr, outer0, outer_size, META)
    _store_scale(scale, scale_ptr, outer0, contraction0, outer_size, padded, META)
    if META.is_mx:
        v = v * per_element(mx_reciprocal(scale), v.shape[0], v.shape[1])
        valid = per_element(scale, v.shape[0], v.shape[1]) != 255
    else:
        wide = per_element(scale, v.shape[0], v.shape[1])
        v = tl.div_rn(v, wide)
        valid = wide == wide
    words = None
    if META.stochastic:
        words = random_words_of_tile(outer0, contraction0, padded, k0, k1, c2, c3, v.shape[0], v.shape[1])
    codes = round_codes(tl.where(valid, v, 0.0), words, META)
    store_codes(tl.where(valid, codes, 0), data_ptr, outer0, contraction0, outer_size, padded, META)


@triton.jit
def amax_kernel(
    x_ptr, row_amax, col_amax, row_signs, col_signs,
    rows, cols,
    stride_row, stride_col,
    ROW: tl.constexpr, COL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First pass of the copies whose scale spans an axis: amax bits into zeroed int32 buffers."""
    x = _load(x_ptr, rows, cols, stride_row, stride_col, BLOCK_M, BLOCK_N)
    if ROW is not None:
        _amax_of_copy(x, row_signs, row_amax, tl.program_id(0) * BLOCK_M, rows, ROW)
    if COL is not None:
        _amax_of_copy(tl.trans(x), col_signs, col_amax, tl.program_id(1) * BLOCK_N, cols, COL)


_KEY_WORDS = ("row_k0", "row_k1", "row_c2", "row_c3", "col_k0", "col_k1", "col_c2", "col_c3")


@triton.jit(do_not_specialize=_KEY_WORDS)
def quantize_kernel(
    x_ptr, row_data, row_scale, row_amax, row_signs, col_data, col_scale, col_amax, col_signs,
    rows, cols, row_padded, col_padded,
    stride_row, stride_col,
    row_k0, row_k1, row_c2, row_c3, col_k0, col_k1, col_c2, col_c3,
    ROW: tl.constexpr, COL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Both copies of a tile from one read of it."""
    x = _load(x_ptr, rows, cols, stride_row, stride_col, BLOCK_M, BLOCK_N)
    row0 = tl.program_id(0) * BLOCK_M
    col0 = tl.program_id(1) * BLOCK_N
    if ROW is not None:
        _quantize_copy(
            x, row_signs, row_data, row_scale, row_amax, row0, col0, rows, row_padded,
            row_k0, row_k1, row_c2, row_c3, ROW,
        )  # fmt: skip
    if COL is not None:
        _quantize_copy(
            tl.trans(x), col_signs, col_data, col_scale, col_amax, col0, row0, cols, col_padded,
            col_k0, col_k1, col_c2, col_c3, COL,
        )  # fmt: skip
