"""MXFP4 copies of a bf16 tensor, rowwise and rotated columnwise, from one read held in registers (Triton).

Math      row: scale of 32 columns, round.  column: H16 or H32 along tokens, scale of 32 tokens, round
Layout    x [tokens, cols] bf16, read as words of two columns. A thread holds 32 tokens x 8 columns: the rotation, the columnwise
          amax and the packing of both copies never leave it; the rowwise amax is shared by 4 threads. A program is TOKEN_BLOCKS x 32
          tokens by COL_GROUPS x 8 columns. The columnwise codes cross shared memory once, to be stored 16 bytes a thread
Cost      2 + 1 + 1/16 bytes an element. About 22 instructions an element in all on sm_90, where 132 SMs issue 3.3e13 lanes a second
          (0.67 ps an element at 1.98 GHz), against 0.72 ps for the bytes at 4.27 TB/s: both matter
Numerics  butterflies in fp32 in the reference's order; same bits as kernels/reference/quantize.py
Limits    cols a multiple of 8, unit column stride, rows 16-byte aligned, round to nearest; other cases: quantize_tile.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.fp4_codes import amax_bits_of_pairs, high_half, low_half, pack8_bf16, pack8_f32
from primus_turbo_plugin.kernels.triton.rotation import rotate_registers
from primus_turbo_plugin.kernels.triton.rounding import abs_bits, mx_scale_byte

_TOKENS = tl.constexpr(32)
"""Tokens of a block: one scale of the columnwise copy."""


@triton.jit
def _inverse_bits(byte):
    """fp32 bits of 2^(127 - byte); 0 for a NaN byte."""
    return tl.maximum(254 - byte, 0) << 23


@triton.jit
def _stack(tensors, LOG2_COUNT: tl.constexpr):
    """2^LOG2_COUNT tensors `[a, b]` as one `[a, b, count]`."""
    shape: tl.constexpr = (tensors[0].shape[0], tensors[0].shape[1], 1 << LOG2_COUNT)
    for level in tl.static_range(1, LOG2_COUNT + 1):
        joined = ()
        for i in tl.static_range((1 << LOG2_COUNT) >> level):
            joined = joined + (tl.join(tensors[i], tensors[i + ((1 << LOG2_COUNT) >> level)]),)
        tensors = joined
    return tl.reshape(tensors[0], shape)


@triton.jit
def _spread(per_block, COL_GROUPS: tl.constexpr):
    """`[token blocks, column blocks]` repeated over the 4 groups of 8 columns of each: `[token blocks, column groups]`."""
    a: tl.constexpr = per_block.shape[0]
    b: tl.constexpr = per_block.shape[1]
    return tl.reshape(tl.broadcast_to(per_block[:, :, None], (a, b, 4)), (a, COL_GROUPS))


@triton.jit
def _over_columns(amax, COL_GROUPS: tl.constexpr):
    """Largest of the 4 groups of 8 columns that share a scale: `[token blocks, column blocks]`."""
    return tl.max(tl.reshape(amax, (amax.shape[0], COL_GROUPS // 4, 4)), axis=2)


@triton.jit
def _load_words(x_ptr, token, group, rows, col_groups, row_words, COL_GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """32 tokens of words: a tuple of (w0, w1, w2, w3), each int32 `[token blocks, column groups]`."""
    word = tl.program_id(0) * COL_GROUPS * 4 + tl.arange(0, COL_GROUPS * 4)
    place = x_ptr + token.to(tl.int64)[:, None] * row_words + word[None, :]
    tokens = ()
    for i in tl.static_range(_TOKENS):
        if EVEN:
            words = tl.load(place + i * row_words)
        else:
            mask = (token + i < rows)[:, None] & (word < col_groups * 4)[None, :]
            words = tl.load(place + i * row_words, mask=mask, other=0)
        even, odd = tl.split(tl.reshape(words, (token.shape[0], COL_GROUPS, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        tokens = tokens + ((w0, w1, w2, w3),)
    return tokens


@triton.jit
def _row_amax(words, TARGET: tl.constexpr):
    """Per token, the fp32 bits of the amax of each thread's 8 columns: a tuple of int32 `[token blocks, column groups]`."""
    amax = ()
    for i in tl.static_range(_TOKENS):
        amax = amax + (amax_bits_of_pairs(words[i][0], words[i][1], words[i][2], words[i][3], TARGET) << 16,)
    return amax


@triton.jit
def _block_amax(row_amax, COL_GROUPS: tl.constexpr):
    """amax bits of 32 tokens x 32 columns, `[token blocks, column blocks]`."""
    amax = row_amax[0]
    for i in tl.static_range(1, _TOKENS):
        amax = tl.maximum(amax, row_amax[i])
    return _over_columns(amax, COL_GROUPS)


@triton.jit
def _row_copy(
    words, row_amax, block_byte, data_ptr, scale_ptr, token, group, rows, row_words, row_scales,
    META: tl.constexpr, COL_GROUPS: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    clamp: tl.constexpr = META.round_up == 0 and not META.rceil
    place = data_ptr + token.to(tl.int64)[:, None] * row_words + group[None, :]
    bytes_of_tokens = ()
    for i in tl.static_range(_TOKENS):
        if META.block_outer == 1:
            byte = mx_scale_byte(_over_columns(row_amax[i], COL_GROUPS), META)
            bytes_of_tokens = bytes_of_tokens + (byte,)
        else:
            byte = block_byte
        inverse = _spread(_inverse_bits(byte), COL_GROUPS)
        codes = pack8_bf16(words[i][0], words[i][1], words[i][2], words[i][3], inverse, clamp, TARGET)
        codes = tl.where(inverse == 0, 0, codes)
        if EVEN:
            tl.store(place + i * row_words, codes)
        else:
            tl.store(place + i * row_words, codes, mask=(token + i < rows)[:, None] & (group < row_words)[None, :])
    block = tl.program_id(0) * (COL_GROUPS // 4) + tl.arange(0, COL_GROUPS // 4)
    if META.block_outer == 1:
        tokens: tl.constexpr = token.shape[0] * _TOKENS
        scales = tl.permute(_stack(bytes_of_tokens, 5), (0, 2, 1))
        scales = tl.reshape(scales, (tokens, COL_GROUPS // 4)).to(tl.uint8)
        line = tl.program_id(1) * tokens + tl.arange(0, tokens)
        mask = (line < rows)[:, None] & (block < row_scales)[None, :]
        tl.store(scale_ptr + line.to(tl.int64)[:, None] * row_scales + block[None, :], scales, mask=mask)
    else:
        line = token // _TOKENS
        mask = (token < rows)[:, None] & (block < row_scales)[None, :]
        place = scale_ptr + line.to(tl.int64)[:, None] * row_scales + block[None, :]
        tl.store(place, block_byte.to(tl.uint8), mask=mask)


@triton.jit
def _column(words, signs_ptr, J: tl.constexpr, META: tl.constexpr):
    """Column J of each thread's 8, fp32, rotated along its 32 tokens: a tuple of 32."""
    values = ()
    for i in tl.static_range(_TOKENS):
        if J % 2 == 0:
            value = low_half(words[i][J // 2])
        else:
            value = high_half(words[i][J // 2])
        if META.random_signs:
            value = value * tl.load(signs_ptr + i % META.hadamard)
        values = values + (value,)
    if META.hadamard == 16:
        values = rotate_registers(values[0:16], 4) + rotate_registers(values[16:32], 4)
    elif META.hadamard == 32:
        values = rotate_registers(values, 5)
        scaled = ()
        for i in tl.static_range(_TOKENS):
            scaled = scaled + (values[i] * META.rotation_factor,)
        values = scaled
    return values


@triton.jit
def _pack_column(values, byte, META: tl.constexpr, TARGET: tl.constexpr):
    """32 values of a column to four words of codes, `[token blocks, column groups, 4]`."""
    clamp: tl.constexpr = META.round_up == 0 and not META.rceil
    inverse = _inverse_bits(byte).to(tl.float32, bitcast=True)
    if META.hadamard == 16:
        # The factor 1/4 of H16 is a power of two, and a sum of bf16 values is a multiple of 2^-133: exact here as well as before.
        inverse = inverse * META.rotation_factor
    words = ()
    for q in tl.static_range(4):
        y = ()
        for i in tl.static_range(8):
            y = y + (values[q * 8 + i] * inverse,)
        words = words + (tl.where(byte == 255, 0, pack8_f32(y, clamp, TARGET)),)
    return _stack(words, 2)


@triton.jit
def _column_amax(values, META: tl.constexpr, TARGET: tl.constexpr):
    """fp32 bits of the amax of 32 values; NaN above Inf above every number."""
    if TARGET == "generic":
        bits = abs_bits(values[0])
        for i in tl.static_range(1, _TOKENS):
            bits = tl.maximum(bits, abs_bits(values[i]))
        amax = bits.to(tl.float32, bitcast=True)
    else:  # one instruction has |x| as an operand and keeps NaN
        amax = tl.abs(values[0])
        for i in tl.static_range(1, _TOKENS):
            amax = tl.maximum(amax, tl.abs(values[i]), propagate_nan=tl.PropagateNan.ALL)
    if META.hadamard == 16:
        amax = amax * META.rotation_factor
    return abs_bits(amax)


@triton.jit
def _col_copy(
    words, block_byte, signs_ptr, data_ptr, scale_ptr, col_groups, col_blocks,
    META: tl.constexpr, TOKEN_BLOCKS: tl.constexpr, COL_GROUPS: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    codes = ()
    scales = ()
    for j in tl.static_range(8):
        values = _column(words, signs_ptr, j, META)
        if META.block_outer == 1:
            byte = mx_scale_byte(_column_amax(values, META, TARGET), META)
        else:
            byte = _spread(block_byte, COL_GROUPS)
        codes = codes + (_pack_column(values, byte, META, TARGET),)
        scales = scales + (byte,)
    # [token blocks, column groups, 4 words, 8 columns] -> [columns, token blocks x 4 words]
    codes = tl.join(
        tl.join(tl.join(codes[0], codes[4]), tl.join(codes[2], codes[6])),
        tl.join(tl.join(codes[1], codes[5]), tl.join(codes[3], codes[7])),
    )
    codes = tl.permute(tl.reshape(codes, (TOKEN_BLOCKS, COL_GROUPS, 4, 8)), (1, 3, 0, 2))
    codes = tl.reshape(codes, (COL_GROUPS * 8, TOKEN_BLOCKS * 4))
    col = tl.program_id(0) * COL_GROUPS * 8 + tl.arange(0, COL_GROUPS * 8)
    word = tl.program_id(1) * TOKEN_BLOCKS * 4 + tl.arange(0, TOKEN_BLOCKS * 4)
    place = data_ptr + col.to(tl.int64)[:, None] * (col_blocks * 4) + word[None, :]
    mask = (col < col_groups * 8)[:, None] & (word < col_blocks * 4)[None, :]
    if EVEN:
        tl.store(place, codes)
    else:
        tl.store(place, codes, mask=mask)
    block = tl.program_id(1) * TOKEN_BLOCKS + tl.arange(0, TOKEN_BLOCKS)
    if META.block_outer == 1:
        scales = tl.permute(_stack(scales, 3), (1, 2, 0))
        scales = tl.reshape(scales, (COL_GROUPS * 8, TOKEN_BLOCKS)).to(tl.uint8)
        mask = (col < col_groups * 8)[:, None] & (block < col_blocks)[None, :]
        tl.store(scale_ptr + col.to(tl.int64)[:, None] * col_blocks + block[None, :], scales, mask=mask)
    else:
        line = tl.program_id(0) * (COL_GROUPS // 4) + tl.arange(0, COL_GROUPS // 4)
        mask = (line * 4 < col_groups)[:, None] & (block < col_blocks)[None, :]
        tl.store(scale_ptr + line.to(tl.int64)[:, None] * col_blocks + block[None, :], tl.trans(block_byte).to(tl.uint8), mask)


@triton.jit
def quantize_mxfp4_bf16_kernel(
    x_ptr, row_data, row_scale, col_data, col_scale, signs_ptr,
    rows, col_groups, row_scales, col_blocks,
    row_stride16,
    ROW: tl.constexpr, COL: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, COL_GROUPS: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Both copies of TOKEN_BLOCKS * 32 tokens by COL_GROUPS * 8 columns.

    `x_ptr`, `row_data` and `col_data` are int32: two bf16 or eight codes a word. `row_stride16` is x's row stride in 16-byte units.
    """
    token = (tl.program_id(1) * TOKEN_BLOCKS + tl.arange(0, TOKEN_BLOCKS)) * _TOKENS
    group = tl.program_id(0) * COL_GROUPS + tl.arange(0, COL_GROUPS)
    words = _load_words(x_ptr, token, group, rows, col_groups, row_stride16 * 4, COL_GROUPS, EVEN)
    row_amax = ()
    block_byte = None
    if ROW is not None:
        row_amax = _row_amax(words, TARGET)
        if ROW.block_outer == 32:
            block_byte = mx_scale_byte(_block_amax(row_amax, COL_GROUPS), ROW)
        _row_copy(
            words, row_amax, block_byte, row_data, row_scale, token, group, rows, row_scales * 4, row_scales,
            ROW, COL_GROUPS, EVEN, TARGET,
        )  # fmt: skip
    if COL is not None:
        if COL.block_outer == 32:
            block_byte = mx_scale_byte(_block_amax(_row_amax(words, TARGET), COL_GROUPS), COL)
        _col_copy(
            words, block_byte, signs_ptr, col_data, col_scale, col_groups, col_blocks,
            COL, TOKEN_BLOCKS, COL_GROUPS, EVEN, TARGET,
        )  # fmt: skip
