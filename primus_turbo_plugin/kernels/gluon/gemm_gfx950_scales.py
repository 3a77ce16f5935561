"""MX scales of the gfx950 GEMMs: from memory to the registers of v_mfma_scale_f32_32x32x64_f8f6f4 (Gluon).

The instruction takes from lane l the scale of row l % 32, block l / 32 of a 32 x 2 piece, as one of four bytes of a register. In
the gfx950 layout (`precision.scale_layout`) the word [m2, (c2, c0, m0)] has the bytes (c1, m1); so a lane loads the words
c0 = l / 32 and c0 = l / 32 + 2 of its row's m0, for 256 elements of the contraction, and takes their bytes m1 by one v_perm_b32.
That is all that a tile of FP4 codes needs, and twice what one of FP8 codes does. Plain scales are loaded byte by byte, for
stretches of rows or of the contraction that start anywhere.
"""

# mypy: disable-error-code="assignment,no-redef"
# (tuples grow in kernels, and branches of compile-time conditions define names again)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from primus_turbo_plugin.kernels.gluon.gemm_gfx950_tiles import operand_layout, tile_blocks

BLOCKS = gl.constexpr(8)
"""Blocks of a word's piece of the gfx950 layout."""
WORDS = gl.constexpr(64)
"""32-bit words of 32 rows x 8 blocks."""


@gluon.constexpr_function
def scale_layout(index, rows, blocks, P):
    """Registers in which the instruction wants the scales `[rows, blocks]` of a piece."""
    return cdna4.get_mfma_scale_layout(operand_layout(index, P), [rows, blocks])


@gluon.jit
def load_scale(index: gl.constexpr, piece: gl.constexpr, ptr, row, rows_left, stride, block, blocks,
               MASKED: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """Starts loading the scales of a piece.

    Args:
        ptr: Words `[padded rows / 32, ...]` of the gfx950 layout, or plain bytes `[rows, blocks]`.
        row: First row of the tile; in the gfx950 layout a multiple of 32.
        rows_left: Rows of the operand from there on. What lies past them repeats, and is not stored.
        block: First block. Past the last one the codes are zero; there the gfx950 layout's last scales are repeated (no NaN comes
            of it that is not in the row already), plain ones are 1.
        blocks: Blocks that exist.
        MASKED: Blocks past the last one may be asked for.

    Returns:
        Two words `[rows, 2]` (row, c0 and c0 + 2), or the tile's bytes `[rows, blocks]`, in a tuple.
    """
    rows: gl.constexpr = P.HM if index == 0 else P.HN
    if P.A_SHUFFLED if index == 0 else P.B_SHUFFLED:
        layout: gl.constexpr = scale_layout(index, rows, 2, P)
        line = piece * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
        word = gl.arange(0, 2, gl.SliceLayout(0, layout)) * 16
        stretch = row // 32 + gl.minimum(line // 32, (rows_left - 1) // 32)
        offset = (stretch * stride + line % 16)[:, None] + word[None, :]
        eight = block // BLOCKS
        if MASKED:
            eight = gl.minimum(eight, (blocks - 1) // BLOCKS)
        corner = ptr + eight * WORDS
        value = (cdna4.buffer_load(corner, offset), cdna4.buffer_load(corner, offset + 32))
    else:
        count: gl.constexpr = tile_blocks(P)
        layout: gl.constexpr = scale_layout(index, rows, count, P)
        line = piece * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
        line = row + gl.minimum(line, rows_left - 1)
        column = block + gl.arange(0, count, gl.SliceLayout(0, layout))
        offset = line[:, None] * stride + column[None, :]
        if MASKED:
            inside = (column < blocks)[None, :] & (line >= 0)[:, None]
            value = (cdna4.buffer_load(ptr, offset, mask=inside, other=127),)
        else:
            value = (cdna4.buffer_load(ptr, offset),)
    return value


@gluon.jit
def arrange_scale(loaded, index: gl.constexpr, P: gl.constexpr):
    """What `load_scale` returned, once it has arrived, in one tensor.

    Of two words, one with the lane's four scales in the order the instruction counts: c0 = l / 32 and c0 + 2, for c1 = 0 and then
    for c1 = 1. v_perm_b32 takes bytes m1 and 2 + m1 of both; m1 is bit 4 of the row.
    """
    rows: gl.constexpr = P.HM if index == 0 else P.HN
    value = loaded[0]
    if P.A_SHUFFLED if index == 0 else P.B_SHUFFLED:
        line = gl.arange(0, rows, gl.SliceLayout(1, scale_layout(index, rows, 2, P)))
        selector, _ = gl.broadcast((0x06020400 + line // 16 % 2 * 0x01010101)[:, None], value)
        value = gl.inline_asm_elementwise(
            "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [loaded[1], value, selector], dtype=gl.int32, is_pure=True, pack=1
        )
    return value


@gluon.jit
def step_scale(arranged, index: gl.constexpr, t: gl.constexpr, step: gl.constexpr, P: gl.constexpr):
    """The scales `[rows, blocks]` of one step of an even (t = 0) or odd tile, from what was arranged for the tile."""
    rows: gl.constexpr = P.HM if index == 0 else P.HN
    count: gl.constexpr = tile_blocks(P) // P.STEPS
    half: gl.constexpr = step if P.A == "e2m1" else t
    if P.A_SHUFFLED if index == 0 else P.B_SHUFFLED:
        low = gl.join((arranged & 0xFF).to(gl.uint8), ((arranged >> 8) & 0xFF).to(gl.uint8))  # row, c0 % 2, c0 / 2
        high = gl.join(((arranged >> 16) & 0xFF).to(gl.uint8), ((arranged >> 24) & 0xFF).to(gl.uint8))
        if count == BLOCKS:
            value = gl.join(low, high).permute([0, 3, 2, 1]).reshape([rows, count])
        else:
            value = (low if half == 0 else high).permute([0, 2, 1]).reshape([rows, count])
    elif count == tile_blocks(P):
        value = arranged
    else:
        first, second = gl.split(arranged.reshape([rows, 2, count]).permute([0, 2, 1]))
        value = first if half == 0 else second
    return gl.convert_layout(value, scale_layout(index, rows, count, P))
