"""The gfx950 scale layout: index law, round trip, padding, and what a lane of the scaled MFMA finds."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.precision.scale_layout import (
    shuffle_scale,
    shuffled_index,
    shuffled_shape,
    unshuffle_scale,
)


@pytest.mark.parametrize(("rows", "blocks"), [(32, 8), (64, 24), (1, 1), (33, 9), (100, 4), (16, 17)])
def test_every_scale_lies_where_the_index_law_says(rows: int, blocks: int, rng: torch.Generator) -> None:
    scale = torch.randint(1, 255, (rows, blocks), dtype=torch.uint8, generator=rng)
    shuffled = shuffle_scale(scale, rows)
    assert tuple(shuffled.shape) == shuffled_shape(rows, blocks)
    places = {shuffled_index(row, block) for row in range(rows) for block in range(blocks)}
    assert len(places) == rows * blocks
    for row in range(rows):
        for block in range(blocks):
            assert shuffled[shuffled_index(row, block)] == scale[row, block]
    assert int((shuffled != 0).sum()) == rows * blocks  # padding is the byte 0, no scale drawn here is


@pytest.mark.parametrize(("rows", "blocks"), [(0, 4), (32, 8), (7, 3), (257, 16)])
@pytest.mark.parametrize("block_outer", [1, 32])
def test_round_trip(rows: int, blocks: int, block_outer: int, rng: torch.Generator) -> None:
    scale = torch.randint(0, 256, (-(-rows // block_outer), blocks), dtype=torch.uint8, generator=rng)
    shuffled = shuffle_scale(scale, rows, block_outer=block_outer)
    assert torch.equal(unshuffle_scale(shuffled, rows, blocks, block_outer=block_outer), scale)


def test_a_lane_loads_the_four_bytes_of_its_row_and_block(rng: torch.Generator) -> None:
    """Lane l of a 16x16x128 scaled MFMA gives the scale of row l % 16, block l // 16: byte 2 c1 + m1 of its word."""
    scale = torch.randint(0, 256, (32, 8), dtype=torch.uint8, generator=rng)
    words = shuffle_scale(scale, 32).view(64, 4)
    for lane in range(64):
        row, block = lane % 16, lane // 16
        want = [scale[row + 16 * m1, block + 4 * c1] for c1 in (0, 1) for m1 in (0, 1)]
        assert words[lane].tolist() == [int(byte) for byte in want]


def test_a_shared_scale_is_repeated_for_its_rows(rng: torch.Generator) -> None:
    scale = torch.randint(0, 256, (2, 8), dtype=torch.uint8, generator=rng)
    want = shuffle_scale(scale.repeat_interleave(32, 0)[:40], 40)
    assert torch.equal(shuffle_scale(scale, 40, block_outer=32), want)


def test_refuses_what_has_no_such_layout() -> None:
    with pytest.raises(ShapeError, match=r"uint8 \[4, blocks\] for 4 rows .* got torch.float32 \[4, 1\]"):
        shuffle_scale(torch.ones(4, 1), 4)
    with pytest.raises(ShapeError, match=r"for 40 rows in blocks of 32, got torch.uint8 \[40, 8\]"):
        shuffle_scale(torch.zeros(40, 8, dtype=torch.uint8), 40, block_outer=32)
    with pytest.raises(ShapeError, match=r"uint8 \[2, 512\], got torch.uint8 \[2, 256\]"):
        unshuffle_scale(torch.zeros(2, 256, dtype=torch.uint8), 64, 16)
