"""MX scales of the gfx950 GEMMs: from memory to the registers of v_mfma_scale_f32_16x16x128_f8f6f4 (Gluon).

In the gfx950 layout (`precision.scale_layout`) a lane loads 32 bits, the scales of two rows and two blocks, for 256 elements of
the contraction: all that a tile of FP4 codes needs, and twice what one of FP8 codes does. Plain scales are loaded byte by byte,
for stretches of rows or of the contraction that start anywhere.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from primus_turbo_plugin.kernels.gluon.gemm_gfx950_tiles import operand_layout, tile_blocks

BLOCKS = gl.constexpr(8)
"""Blocks loaded at once."""
WORDS = gl.constexpr(64)
"""32-bit words of 32 rows x 8 blocks in the gfx950 layout: one a lane."""


@gluon.constexpr_function
def scale_layout(index, rows, blocks, P):
    """Registers in which the instruction wants the scales `[rows, blocks]` of a piece."""
    return cdna4.get_mfma_scale_layout(operand_layout(index, P), [rows, blocks])


@gluon.constexpr_function
def word_layout(index, rows):
    """Registers of a piece's words `[rows / 32, 64]`: one a lane; waves that multiply the same 32 rows load the same."""
    waves = [[0, 0], [1, 0]] if index == 0 else [[1, 0], [0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[[2, 0]] if rows == 128 else [],
        lane_bases=[[0, 1 << bit] for bit in range(6)],
        warp_bases=waves,
        block_bases=[],
        shape=[rows // 32, 64],
    )


@gluon.jit
def load_scale(index: gl.constexpr, piece: gl.constexpr, ptr, row, rows_left, stride, block, blocks, P: gl.constexpr):
    """Starts loading the scales of a piece for 256 elements.

    Args:
        ptr: Words `[padded rows / 32, ...]` of the gfx950 layout, or plain bytes `[rows, blocks]`.
        row: First row of the tile; in the gfx950 layout a multiple of 32.
        rows_left: Rows of the operand from there on. What lies past them repeats, and is not stored.
        block: First block. Past the last one the codes are zero; there the gfx950 layout's last scales are repeated (no NaN comes
            of it that is not in the row already), plain ones are 1.
        blocks: Blocks that exist.

    Returns:
        Words `[rows / 32, 64]`, or the tile's bytes `[rows, blocks]`.
    """
    rows: gl.constexpr = P.HM if index == 0 else P.HN
    if P.A_SHUFFLED if index == 0 else P.B_SHUFFLED:
        layout: gl.constexpr = word_layout(index, rows)
        stretch = piece * (rows // 32) + gl.arange(0, rows // 32, gl.SliceLayout(1, layout))
        stretch = row // 32 + gl.minimum(stretch, (rows_left - 1) // 32)
        word = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
        first = gl.minimum(block // BLOCKS, (blocks - 1) // BLOCKS) * WORDS
        value = cdna4.buffer_load(ptr + first, stretch[:, None] * stride + word[None, :])
    else:
        count: gl.constexpr = tile_blocks(P)
        layout: gl.constexpr = scale_layout(index, rows, count, P)
        line = piece * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
        line = row + gl.minimum(line, rows_left - 1)
        column = block + gl.arange(0, count, gl.SliceLayout(0, layout))
        inside = (column < blocks)[None, :] & (line >= 0)[:, None]
        value = cdna4.buffer_load(ptr, line[:, None] * stride + column[None, :], mask=inside, other=127)
    return value


@gluon.jit
def step_scale(loaded, index: gl.constexpr, t: gl.constexpr, step: gl.constexpr, P: gl.constexpr):
    """The scales `[rows, blocks]` of one step of an even (t = 0) or odd tile, from what was loaded for the tile."""
    rows: gl.constexpr = P.HM if index == 0 else P.HN
    count: gl.constexpr = tile_blocks(P) // P.STEPS
    half: gl.constexpr = step if P.A == "e2m1" else t
    if P.A_SHUFFLED if index == 0 else P.B_SHUFFLED:
        # word [m2, (c0, m0)], its bytes (c1, m1) from the low one up; see precision.scale_layout
        low = gl.join((loaded & 0xFF).to(gl.uint8), ((loaded >> 8) & 0xFF).to(gl.uint8))
        high = gl.join(((loaded >> 16) & 0xFF).to(gl.uint8), ((loaded >> 24) & 0xFF).to(gl.uint8))
        if count == BLOCKS:
            value = gl.join(low, high).reshape([rows // 32, 4, 16, 2, 2]).permute([0, 3, 2, 4, 1])  # m2, m1, m0, c1, c0
        else:
            value = (low if half == 0 else high).reshape([rows // 32, 4, 16, 2]).permute([0, 3, 2, 1])
        value = value.reshape([rows, count])
    elif count == tile_blocks(P):
        value = loaded
    else:
        first, second = gl.split(loaded.reshape([rows, 2, count]).permute([0, 2, 1]))
        value = first if half == 0 else second
    return gl.convert_layout(value, scale_layout(index, rows, count, P))
