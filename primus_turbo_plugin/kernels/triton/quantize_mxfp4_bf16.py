"""MXFP4 copies of a bf16 tensor, rowwise and rotated columnwise, by one program a tile (Triton).

Math      row: scale of 32 columns, round.  column: H16 or H32 along tokens, scale of 32 tokens, round
Layout    x [tokens, cols] bf16, read as words of two columns. A program is TOKEN_BLOCKS x 32 tokens by COL_GROUPS x 4 columns.
          Rows: 16 bytes a thread, 4 threads share a scale. Columns: a thread holds 32 tokens x 4 columns, so that rotation,
          amax and packing never leave it; its codes cross shared memory once, to be stored 16 bytes a thread
Cost      2 + 1 + 1/16 bytes an element of device memory: the tile is read twice, the second time from the L1 cache. About 23
          instructions an element on sm_90 (columns 15, rows 8); docs/performance.md compares that with what the GPU issues
Numerics  butterflies in fp32 in the reference's order; same bits as kernels/reference/quantize.py
Limits    cols a multiple of 8, unit column stride, rows 16-byte aligned, round to nearest; other cases: quantize_tile.py
"""

# Triton's compiler grows tuples by concatenation only:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.fp4_codes import (
    amax_of_words,
    high_half,
    low_half,
    max_of_halves,
    pack8_bf16,
    pack8_f32,
    scale_of_amax,
)
from primus_turbo_plugin.kernels.triton.rotation import rotate_registers
from primus_turbo_plugin.kernels.triton.rounding import abs_bits, mx_scale_byte

_TOKENS = tl.constexpr(32)
"""Tokens of a block: one scale of the columnwise copy."""


@triton.jit
def _inverse_bits(byte):
    """fp32 bits of 2^(127 - byte); 0 for a NaN byte."""
    return tl.maximum(254 - byte, 0) << 23


@triton.jit
def _load_row_words(x_ptr, token, col_tile, rows, cols8, row_words, COL_GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Words of a tile by rows, 16 bytes a thread: (w0, w1, w2, w3), each int32 `[tokens, 8-column groups]`."""
    word = col_tile * (COL_GROUPS * 2) + tl.arange(0, COL_GROUPS * 2)
    place = x_ptr + token.to(tl.int64)[:, None] * row_words + word[None, :]
    if EVEN:
        words = tl.load(place)
    else:
        words = tl.load(place, mask=(token < rows)[:, None] & (word < cols8 * 4)[None, :], other=0)
    even, odd = tl.split(tl.reshape(words, (token.shape[0], COL_GROUPS // 2, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _over_columns(amax, TARGET: tl.constexpr):
    """Largest of the 4 groups of 8 columns that share a scale: `[tokens, column blocks]`."""
    amax = tl.reshape(amax, (amax.shape[0], amax.shape[1] // 4, 4))
    if TARGET == "sm90":
        amax = tl.reduce(amax, 2, max_of_halves) & 0x7FFF7FFF
    else:
        amax = tl.max(amax, axis=2)
    return amax


@triton.jit
def _spread(per_block, TIMES: tl.constexpr):
    """`[a, b]` with every column repeated: `[a, b * TIMES]`."""
    a: tl.constexpr = per_block.shape[0]
    b: tl.constexpr = per_block.shape[1]
    return tl.reshape(tl.broadcast_to(per_block[:, :, None], (a, b, TIMES)), (a, b * TIMES))


@triton.jit
def _row_copy(
    x_ptr, data_ptr, scale_ptr, token_tile, col_tile, rows, cols8, row_words, row_scales, row_data_words,
    META: tl.constexpr, TOKEN_BLOCKS: tl.constexpr, COL_GROUPS: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Codes and scales of the rowwise copy of the tile, 32 tokens at a time."""
    group = col_tile * (COL_GROUPS // 2) + tl.arange(0, COL_GROUPS // 2)
    for i in range(TOKEN_BLOCKS):
        token_block = token_tile * TOKEN_BLOCKS + i
        token = token_block * _TOKENS + tl.arange(0, _TOKENS)
        w0, w1, w2, w3 = _load_row_words(x_ptr, token, col_tile, rows, cols8, row_words, COL_GROUPS, EVEN)
        amax = _over_columns(amax_of_words(w0, w1, w2, w3, TARGET), TARGET)
        if META.block_outer == 32:
            amax = tl.broadcast_to(tl.max(amax, axis=0)[None, :], amax.shape)
        # From here on every group of 8 columns has its own copy of the scale: to store one a block then needs no shared memory.
        inverse, keep, byte = scale_of_amax(_spread(amax, 4), META.bf16_round_up, TARGET)
        line = token // META.block_outer
        mask = (token % META.block_outer == 0) & (token < rows)
        mask = mask[:, None] & ((group % 4 == 0) & (group < row_data_words))[None, :]
        # The hint only orders the threads along the row; single bytes at unknown alignment are never joined to wider stores.
        block = tl.max_contiguous(group // 4, COL_GROUPS // 2)
        place = scale_ptr + line.to(tl.int64)[:, None] * row_scales + block[None, :]
        tl.store(place, byte.to(tl.uint8), mask=mask)
        codes = pack8_bf16(w0, w1, w2, w3, inverse, keep, META.bf16_round_up == 0, TARGET)
        place = data_ptr + token.to(tl.int64)[:, None] * row_data_words + group[None, :]
        if EVEN:
            tl.store(place, codes)
        else:
            tl.store(place, codes, mask=(token < rows)[:, None] & (group < row_data_words)[None, :])


@triton.jit
def _load_column_words(
    x_ptr, token_tile, col_tile, rows, cols8, row_words,
    TOKEN_BLOCKS: tl.constexpr, COL_GROUPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Words of 32 tokens x 4 columns a thread: a tuple of 32 (w0, w1), each int32 `[token blocks, column groups]`."""
    token = (token_tile * TOKEN_BLOCKS + tl.arange(0, TOKEN_BLOCKS)) * _TOKENS
    word = col_tile * COL_GROUPS * 2 + tl.arange(0, COL_GROUPS * 2)
    place = x_ptr + token.to(tl.int64)[:, None] * row_words + word[None, :]
    tokens = ()
    for i in tl.static_range(_TOKENS):
        if EVEN:
            words = tl.load(place + i * row_words)
        else:
            mask = (token + i < rows)[:, None] & (word < cols8 * 4)[None, :]
            words = tl.load(place + i * row_words, mask=mask, other=0)
        w0, w1 = tl.split(tl.reshape(words, (TOKEN_BLOCKS, COL_GROUPS, 2)))
        tokens = tokens + ((w0, w1),)
    return tokens


@triton.jit
def _block_byte(words, META: tl.constexpr, TARGET: tl.constexpr):
    """E8M0 bytes of 32 tokens x 32 columns, `[token blocks, column blocks]`."""
    amax = amax_of_words(words[0][0], words[0][1], words[1][0], words[1][1], TARGET)
    for i in tl.static_range(1, _TOKENS // 2):
        a = words[2 * i]
        b = words[2 * i + 1]
        amax = tl.maximum(amax, amax_of_words(a[0], a[1], b[0], b[1], TARGET))
    amax = tl.max(tl.reshape(amax, (amax.shape[0], amax.shape[1] // 8, 8)), axis=2)
    return mx_scale_byte(amax & 0x7FFF0000, META)


@triton.jit
def _column(words, signs_ptr, J: tl.constexpr, META: tl.constexpr):
    """Column J of each thread's 4, fp32, rotated along its 32 tokens: a tuple of 32."""
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
    clamp: tl.constexpr = META.bf16_round_up == 0
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
    return _join4(words)


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
def _join4(tensors):
    """Four tensors to one with a last axis of 4."""
    joined = tl.join(tl.join(tensors[0], tensors[2]), tl.join(tensors[1], tensors[3]))
    return tl.reshape(joined, tensors[0].shape + [4])


@triton.jit
def _col_copy(
    words, signs_ptr, data_ptr, scale_ptr, token_tile, col_tile, cols8, col_blocks,
    META: tl.constexpr, TOKEN_BLOCKS: tl.constexpr, COL_GROUPS: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Codes and scales of the columnwise copy of the tile, from `_load_column_words`."""
    if META.block_outer == 32:
        block_byte = _block_byte(words, META, TARGET)
    codes = ()
    scales = ()
    for j in tl.static_range(4):
        values = _column(words, signs_ptr, j, META)
        if META.block_outer == 1:
            byte = mx_scale_byte(_column_amax(values, META, TARGET), META)
        else:
            byte = _spread(block_byte, 8)
        codes = codes + (_pack_column(values, byte, META, TARGET),)
        scales = scales + (byte,)
    # [token blocks, column groups, 4 words, 4 columns] -> [columns, token blocks x 4 words]
    codes = tl.permute(_join4(codes), (1, 3, 0, 2))
    codes = tl.reshape(codes, (COL_GROUPS * 4, TOKEN_BLOCKS * 4))
    col = col_tile * COL_GROUPS * 4 + tl.arange(0, COL_GROUPS * 4)
    word = token_tile * TOKEN_BLOCKS * 4 + tl.arange(0, TOKEN_BLOCKS * 4)
    place = data_ptr + col.to(tl.int64)[:, None] * (col_blocks * 4) + word[None, :]
    mask = (col < cols8 * 8)[:, None] & (word < col_blocks * 4)[None, :]
    if EVEN:
        tl.store(place, codes)
    else:
        tl.store(place, codes, mask=mask)
    block = token_tile * TOKEN_BLOCKS + tl.arange(0, TOKEN_BLOCKS)
    if META.block_outer == 1:
        scales = tl.permute(_join4(scales), (1, 2, 0))
        scales = tl.reshape(scales, (COL_GROUPS * 4, TOKEN_BLOCKS)).to(tl.uint8)
        mask = (col < cols8 * 8)[:, None] & (block < col_blocks)[None, :]
        tl.store(scale_ptr + col.to(tl.int64)[:, None] * col_blocks + block[None, :], scales, mask=mask)
    else:
        line = col_tile * (COL_GROUPS // 8) + tl.arange(0, COL_GROUPS // 8)
        mask = (line * 4 < cols8)[:, None] & (block < col_blocks)[None, :]
        byte = tl.trans(block_byte).to(tl.uint8)
        tl.store(scale_ptr + line.to(tl.int64)[:, None] * col_blocks + block[None, :], byte, mask=mask)


@triton.jit
def _tile_of_program(row_scales, col_blocks, TOKEN_BLOCKS: tl.constexpr, COL_GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """(token tile, column tile): GROUP token tiles side by side, whose pieces of a columnwise row meet in the L2 cache."""
    pid = tl.program_id(0)
    token_tiles = tl.cdiv(col_blocks, TOKEN_BLOCKS)
    col_tiles = tl.cdiv(row_scales * 8, COL_GROUPS)
    first = pid // (GROUP * col_tiles) * GROUP
    size = tl.minimum(token_tiles - first, GROUP)
    within = pid % (GROUP * col_tiles)
    return first + within % size, within // size


@triton.jit(do_not_specialize=("row_scales", "row_data_words"))
def quantize_mxfp4_bf16_kernel(
    x_ptr, row_data, row_scale, col_data, col_scale, signs_ptr,
    rows, cols8, row_scales, col_blocks,
    row_stride16, row_data_words,
    ROW: tl.constexpr, COL: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, COL_GROUPS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Both copies of TOKEN_BLOCKS * 32 tokens by COL_GROUPS * 4 columns.

    `x_ptr`, `row_data` and `col_data` are int32: two bf16 or eight codes. `cols8` counts groups of 8 columns, `row_stride16` is
    x's row stride in 16-byte units. `row_scales` and `row_data_words` are not specialised: knowing their divisibility, Triton
    would exchange words between threads through shared memory, behind barriers, to store 16 bytes a thread.
    """
    token_tile, col_tile = _tile_of_program(row_scales, col_blocks, TOKEN_BLOCKS, COL_GROUPS, GROUP)
    row_words = row_stride16 * 4
    # All of the tile is asked for at once; the row copy then finds it in the L1 cache while the columns wait in registers.
    words = ()
    if COL is not None:
        words = _load_column_words(x_ptr, token_tile, col_tile, rows, cols8, row_words, TOKEN_BLOCKS, COL_GROUPS, EVEN)
    if ROW is not None:
        _row_copy(
            x_ptr, row_data, row_scale, token_tile, col_tile, rows, cols8, row_words, row_scales, row_data_words,
            ROW, TOKEN_BLOCKS, COL_GROUPS, EVEN, TARGET,
        )  # fmt: skip
    if COL is not None:
        _col_copy(
            words, signs_ptr, col_data, col_scale, token_tile, col_tile, cols8, col_blocks,
            COL, TOKEN_BLOCKS, COL_GROUPS, EVEN, TARGET,
        )  # fmt: skip
