"""Where the E8M0 scales of an operand lie in memory: `plain`, or shuffled for the scaled matrix instructions of gfx950.

Plain     byte of row m, block c at [m, c] of `[rows, blocks]`.
gfx950    v_mfma_scale_f32_16x16x128_f8f6f4 takes from lane l of a wave the scale of row l % 16, block l / 16 of a 16 x 4 piece,
          as one byte of a 32-bit register; a modifier of the instruction says which byte. With the four pieces of 32 rows x 8
          blocks stored byte by byte side by side (256 contiguous bytes, four a lane), one 32-bit load a lane feeds four
          instructions, where plain scales take four loads of a byte each.

              row m = 32 m2 + 16 m1 + m0,  block c = 8 c2 + 4 c1 + c0          (m1, c1 in 0..1, m0 in 0..15, c0 in 0..3)
              place = [m2, (((c2 * 4 + c0) * 16 + m0) * 2 + c1) * 2 + m1]  of `[padded rows / 32, padded blocks * 32]`

          so lane 16 c0 + m0 owns the bytes (c1, m1) = (0, 0) (0, 1) (1, 0) (1, 1). Rows are padded to 32 and blocks to 8 with the
          byte 0, which is a number (2^-127), so that what lies outside the operand multiplies codes of 0 to 0.

A scale that 32 rows share (block 32x32) is repeated for each of them: the instruction wants one a row.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError

ScaleLayout = Literal["plain", "gfx950"]
SCALE_LAYOUTS: tuple[ScaleLayout, ...] = ("plain", "gfx950")

ROWS, BLOCKS = 32, 8
"""Extent of a shuffled piece: 256 bytes."""
_PAD = 0


def shuffled_shape(rows: int, blocks: int) -> tuple[int, int]:
    """Shape of the gfx950 layout of `[rows, blocks]` scales: `[padded rows / 32, padded blocks * 32]`."""
    return -(-rows // ROWS), -(-blocks // BLOCKS) * BLOCKS * ROWS


def shuffled_index(row: int, block: int) -> tuple[int, int]:
    """Place of the scale of (row, block) in the gfx950 layout. The law that `shuffle_scale` and the kernels follow.

    >>> shuffled_index(0, 0), shuffled_index(16, 0), shuffled_index(0, 4), shuffled_index(1, 0), shuffled_index(0, 1)
    ((0, 0), (0, 1), (0, 2), (0, 4), (0, 64))
    """
    m2, m1, m0 = row // 32, row // 16 % 2, row % 16
    c2, c1, c0 = block // 8, block // 4 % 2, block % 4
    return m2, (((c2 * 4 + c0) * 16 + m0) * 2 + c1) * 2 + m1


def shuffle_scale(scale: Tensor, rows: int, *, block_outer: int = 1) -> Tensor:
    """Plain E8M0 scales in the gfx950 layout.

    Args:
        scale: uint8 `[ceil(rows / block_outer), blocks]`.
        rows: Rows of the operand.
        block_outer: Rows that share a scale, 1 or 32.

    Returns:
        uint8 `shuffled_shape(rows, blocks)`, contiguous.

    Raises:
        ShapeError: The scales are not uint8, or not those of `rows` rows.
    """
    if scale.dtype != torch.uint8 or scale.dim() != 2 or scale.shape[0] != -(-rows // block_outer):
        raise ShapeError(
            f"shuffle_scale: scale must be E8M0 bytes, uint8 [{-(-rows // block_outer)}, blocks] for {rows} rows in blocks of "
            f"{block_outer}, got {scale.dtype} {list(scale.shape)}. Only MX scales have this layout."
        )
    per_row = scale.repeat_interleave(block_outer, 0)[:rows] if block_outer > 1 else scale
    height, width = shuffled_shape(rows, scale.shape[1])
    padded = per_row.new_full((height * ROWS, width // ROWS), _PAD)
    padded[:rows, : scale.shape[1]] = per_row
    pieces = padded.view(height, 2, 16, width // ROWS // BLOCKS, 2, 4)  # m2, m1, m0, c2, c1, c0
    return pieces.permute(0, 3, 5, 2, 4, 1).reshape(height, width)


def unshuffle_scale(shuffled: Tensor, rows: int, blocks: int, *, block_outer: int = 1) -> Tensor:
    """Inverse of `shuffle_scale`: plain `[ceil(rows / block_outer), blocks]`, padding dropped.

    Raises:
        ShapeError: `shuffled` is not the gfx950 layout of that many scales.
    """
    height, width = shuffled_shape(rows, blocks)
    if shuffled.dtype != torch.uint8 or tuple(shuffled.shape) != (height, width):
        raise ShapeError(
            f"unshuffle_scale: the gfx950 layout of {rows} x {blocks} scales is uint8 [{height}, {width}], got "
            f"{shuffled.dtype} {list(shuffled.shape)}. Pass the rows and blocks they were shuffled with."
        )
    pieces = shuffled.reshape(height, width // ROWS // BLOCKS, 4, 16, 2, 2)  # m2, c2, c0, m0, c1, m1
    plain = pieces.permute(0, 5, 3, 1, 4, 2).reshape(height * ROWS, width // ROWS)
    return plain[:rows:block_outer, :blocks].contiguous()
