"""Device functions: where the scales of quantize_shared.py come from and go to (Gluon).

Layout    E8M0 bytes plain, or as gfx950's matrix units read them (precision/scale_layout.py). FP8 scales: one a token or column
          of a tile (1x128, rowwise), or one for the tile (128x128, tensorwise)
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from primus_turbo_plugin.kernels.triton.quantize_block import amax_of_words, upper
from primus_turbo_plugin.kernels.triton.rounding import fp8_block_scale


@gluon.jit
def store_bytes(
    byte, ptr, row0, block0, rows, blocks, block_outer: gl.constexpr, SHUFFLED: gl.constexpr, LAYOUT: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Store `[a, b]` E8M0 bytes, one for each row, in the plain or the gfx950 layout (precision/scale_layout.py)."""
    if SHUFFLED:
        row = row0 + gl.arange(0, byte.shape[0], gl.SliceLayout(1, byte.type.layout))
        block = block0 + gl.arange(0, byte.shape[1], gl.SliceLayout(0, byte.type.layout))
        line = (row // 32).to(gl.int64) * ((blocks + 7) // 8 * 256) + (row % 16 * 4 + row // 16 % 2)
        place = ptr + line[:, None] + (block // 8 * 256 + block % 4 * 64 + block // 4 % 2 * 2)[None, :]
        gl.store(place, byte.to(gl.uint8), mask=(row < rows)[:, None] & (block < blocks)[None, :])
    else:
        if block_outer == 32:
            byte = gl.max(gl.reshape(byte, (byte.shape[0] // 32, 32, byte.shape[1])), axis=1)
            row0 = row0 // 32
            rows = (rows + 31) // 32
        byte = gl.convert_layout(byte.to(gl.uint8), LAYOUT)
        row = row0 + gl.arange(0, byte.shape[0], gl.SliceLayout(1, LAYOUT))
        block = block0 + gl.arange(0, byte.shape[1], gl.SliceLayout(0, LAYOUT))
        place = ptr + row.to(gl.int64)[:, None] * blocks + block[None, :]
        if EVEN:
            gl.store(place, byte)
        else:
            gl.store(place, byte, mask=(row < rows)[:, None] & (block < blocks)[None, :])


@gluon.jit
def fp8_row_scale(
    words, tile_amax, amax_ptr, scale_ptr, token, token_tile, col_tile, first: gl.constexpr, rows, cols8,
    META: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """fp32 scale of the rowwise copy, broadcastable to `[tokens, blocks]`, stored as well. `first`: the tile's first tokens."""
    if META.block_contraction == 0 and META.block_outer == 1:
        scale = fp8_block_scale(gl.load(amax_ptr + token, mask=token < rows, other=0), META)
        gl.store(scale_ptr + token, scale, mask=(token < rows) & (col_tile == 0))
        scale = scale[:, None]
    elif META.block_outer == 1:
        pair = amax_of_words(words, TARGET)
        scale = fp8_block_scale(gl.max(gl.maximum(pair & 0xFFFF, upper(pair)), axis=1) << 16, META)
        gl.store(scale_ptr + token.to(gl.int64) * ((cols8 + 15) // 16) + col_tile, scale, mask=token < rows)
        scale = scale[:, None]
    else:
        scale = _fp8_shared_scale(tile_amax, amax_ptr, META)
        if first:
            _store_shared_scale(scale, scale_ptr, token_tile, col_tile, (cols8 + 15) // 16, META)
    return scale


@gluon.jit
def fp8_column_scale(
    pair, tile_amax, amax_ptr, scale_ptr, col, token_tile, col_tile, first: gl.constexpr, cols, rows,
    HIGH: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """fp32 scale of the lower or upper columns, broadcastable to `[token blocks, words]`, stored as well."""
    if META.block_contraction == 0 and META.block_outer == 1:
        scale = fp8_block_scale(gl.load(amax_ptr + col, mask=col < cols, other=0), META)
        gl.store(scale_ptr + col, scale, mask=(col < cols) & (token_tile == 0))
        scale = scale[None, :]
    elif META.block_outer == 1:
        amax = upper(pair) if HIGH else pair & 0xFFFF
        scale = fp8_block_scale(gl.max(amax, axis=0) << 16, META)
        gl.store(scale_ptr + col.to(gl.int64) * ((rows + 127) // 128) + token_tile, scale, mask=col < cols)
        scale = scale[None, :]
    else:
        scale = _fp8_shared_scale(tile_amax, amax_ptr, META)
        if first:
            _store_shared_scale(scale, scale_ptr, col_tile, token_tile, (rows + 127) // 128, META)
    return scale


@gluon.jit
def _fp8_shared_scale(tile_amax, amax_ptr, META: gl.constexpr):
    """The one scale of a tile: of its own amax, or of the whole tensor's."""
    if META.block_contraction == 0:
        amax = gl.load(amax_ptr)
    else:
        amax = tile_amax
    return fp8_block_scale(amax, META)


@gluon.jit
def _store_shared_scale(scale, scale_ptr, outer_tile, contraction_tile, blocks, META: gl.constexpr):
    if META.block_contraction == 0:
        if (outer_tile == 0) & (contraction_tile == 0):
            gl.store(scale_ptr, scale)
    else:
        gl.store(scale_ptr + outer_tile.to(gl.int64) * blocks + contraction_tile, scale)
