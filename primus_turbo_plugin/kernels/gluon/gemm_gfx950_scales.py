"""MX scales of the gfx950 GEMMs: from memory to the registers of v_mfma_scale_f32_32x32x64_f8f6f4 (Gluon).

The instruction takes from lane l the scale of row l % 32, block l / 32 of a 32 x 2 piece, as one of four bytes of a register. A
lane loads whole words and one v_perm_b32 collects its bytes, so that both layouts cost the same instructions:

gfx950    (`precision.scale_layout`) the word [m2, (c2, c0, m0)] has the bytes (c1, m1); a lane loads the words c0 = l / 32 and
          c0 = l / 32 + 2 of its row's m0, for 256 elements of the contraction, and takes their bytes m1. That is all that a
          tile of FP4 codes needs, and twice what one of FP8 codes does. Starts at multiples of 32 rows and 8 blocks
plain     rows of bytes, a word (FP8 codes) or two (FP4) from the row's place on; a lane takes the bytes l / 32 + 0, 2, 4, 6. For
          experts' stretches of rows or of the contraction, which start anywhere: words need not be aligned (gfx9 reads them
          anywhere in memory; LLVM's amdhsa target counts on that). A load touches 32 rows, so it costs more of the caches
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
_NO_BYTE = gl.constexpr(0x0C)
"""Selector of v_perm_b32 for the byte 0, which is the scale 2^-127."""


@gluon.constexpr_function
def scale_layout(index, rows, blocks, P):
    """Registers in which the instruction wants the scales `[rows, blocks]` of a piece."""
    return cdna4.get_mfma_scale_layout(operand_layout(index, P), [rows, blocks])


@gluon.constexpr_function
def piece_rows(index, P):
    return P.HM if index == 0 else P.HN


@gluon.constexpr_function
def is_shuffled(index, P):
    return P.A_SHUFFLED if index == 0 else P.B_SHUFFLED


@gluon.jit
def _window(block, blocks, MASKED: gl.constexpr, P: gl.constexpr):
    """First plain block to load for a tile that begins at `block`, moved back so that words end where the blocks do."""
    first = block
    if MASKED:
        first = gl.maximum(gl.minimum(block, blocks - tile_blocks(P)), 0)
    return first


@gluon.jit
def load_scale(index: gl.constexpr, piece: gl.constexpr, ptr, row, rows_left, stride, block, blocks,
               MASKED: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """Starts loading the scales of a piece.

    Args:
        ptr: Words `[padded rows / 32, ...]` of the gfx950 layout, or plain bytes `[rows, blocks]`: rows of at least a tile's
            blocks that start at multiples of 4 bytes.
        row: First row of the tile; in the gfx950 layout a multiple of 32.
        rows_left: Rows of the operand from there on. What lies past them repeats, and is not stored.
        block: First block; in the gfx950 layout of a multiple of 8, or of the second half of one.
        blocks: Where the blocks end.
        MASKED: Blocks past the end may be asked for. In the gfx950 layout the last ones are repeated then (the codes are zero
            there, and no NaN comes of it that is not in the row already).

    Returns:
        Words `[rows, 2]` in a tuple, for `arrange_scale`.
    """
    rows: gl.constexpr = piece_rows(index, P)
    layout: gl.constexpr = scale_layout(index, rows, 2, P)
    line = piece * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
    half = gl.arange(0, 2, gl.SliceLayout(0, layout))
    if is_shuffled(index, P):
        stretch = row // 32 + gl.minimum(line // 32, (rows_left - 1) // 32)
        offset = (stretch * stride + line % 16)[:, None] + (half * 16)[None, :]
        eight = block // BLOCKS
        if MASKED:
            eight = gl.minimum(eight, (blocks - 1) // BLOCKS)
        corner = ptr + eight * WORDS
        value = (cdna4.buffer_load(corner, offset), cdna4.buffer_load(corner, offset + 32))
    else:
        corner = ptr + (gl.to_tensor(row).to(gl.int64) * stride + _window(block, blocks, MASKED, P))
        corner = corner.to(gl.pointer_type(gl.int32), bitcast=True)
        offset = (gl.minimum(line, rows_left - 1) * (stride // 4))[:, None] + (half * 0)[None, :]
        if P.A == "e2m1":
            value = (cdna4.buffer_load(corner, offset), cdna4.buffer_load(corner, offset + 1))
        else:
            value = (cdna4.buffer_load(corner, offset),)
    return value


@gluon.jit
def _selector(index: gl.constexpr, block, blocks, MASKED: gl.constexpr, P: gl.constexpr):
    """Which bytes of its words a lane takes.

    gfx950: bytes m1 and 2 + m1 of both words, m1 being bit 4 of the row: the lane's scales in the order the instruction counts,
    c0 = l / 32 and c0 + 2 for c1 = 0 and then for c1 = 1. Plain: every other byte from l / 32 on, which is the same order; where
    words were loaded further back (`_window`), as many bytes later, and none past the end.
    """
    rows: gl.constexpr = piece_rows(index, P)
    layout: gl.constexpr = scale_layout(index, rows, 2, P)
    line = gl.arange(0, rows, gl.SliceLayout(1, layout))
    half = gl.arange(0, 2, gl.SliceLayout(0, layout))
    if is_shuffled(index, P):
        selector = (0x06020400 + line // 16 % 2 * 0x01010101)[:, None] + (half * 0)[None, :]
    else:
        count: gl.constexpr = tile_blocks(P)
        if MASKED:
            later = block - _window(block, blocks, True, P)
            word = half * 0
            for i in gl.static_range(count // 2):
                word += gl.where(half + 2 * i < blocks - block, later + half + 2 * i, _NO_BYTE) << 8 * i
        else:
            word = 0x06040200 + half * 0x01010101
        selector = word[None, :] + (line * 0)[:, None]
    return selector


@gluon.jit
def arrange_scale(loaded, index: gl.constexpr, block, blocks, MASKED: gl.constexpr, P: gl.constexpr):
    """What `load_scale` returned for the tile that begins at `block`, once it has arrived: a lane's scales in one word."""
    low = loaded[0]
    high = loaded[1] if len(loaded) == 2 else low
    selector, _ = gl.broadcast(_selector(index, block, blocks, MASKED, P), low)
    return gl.inline_asm_elementwise(
        "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [high, low, selector], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def step_scale(arranged, index: gl.constexpr, t: gl.constexpr, step: gl.constexpr, P: gl.constexpr):
    """The scales `[rows, blocks]` of one step of an even (t = 0) or odd tile, from what was arranged for the tile."""
    rows: gl.constexpr = piece_rows(index, P)
    count: gl.constexpr = tile_blocks(P) // P.STEPS
    half: gl.constexpr = (step if P.A == "e2m1" else t) if is_shuffled(index, P) or P.A == "e2m1" else 0
    first, second = (arranged & 0xFF).to(gl.uint8), ((arranged >> 8) & 0xFF).to(gl.uint8)  # row, c0 % 2
    third, fourth = ((arranged >> 16) & 0xFF).to(gl.uint8), ((arranged >> 24) & 0xFF).to(gl.uint8)
    if count == BLOCKS:  # row, c0 % 2, c1, c0 / 2: bytes stay in their order, or LLVM would swap two of them twice
        four = gl.join(gl.join(first, third), gl.join(second, fourth))
        value = four.permute([0, 2, 3, 1]).reshape([rows, count])
    else:
        two = gl.join(first, second) if half == 0 else gl.join(third, fourth)
        value = two.permute([0, 2, 1]).reshape([rows, count])
    return gl.convert_layout(value, scale_layout(index, rows, count, P))
