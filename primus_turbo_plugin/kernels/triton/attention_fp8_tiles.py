"""Tile shapes of FP8 attention's forward kernel: data, by architecture and size of the head. Both sides divide 128."""

from __future__ import annotations

from primus_turbo_plugin.kernels.triton.attention_tiles import Tile

_TILES: dict[str, tuple[tuple[int, Tile], ...]] = {
    "sm90": (
        (64, Tile(128, 128, 8, 3)),
        (128, Tile(128, 128, 8, 3)),
        (256, Tile(128, 64, 8, 2)),
    ),
    "gfx950": ((64, Tile(128, 128, 4, 2)), (128, Tile(128, 64, 4, 2)), (256, Tile(128, 64, 4, 2))),
    "gfx942": ((128, Tile(128, 64, 4, 1)), (256, Tile(64, 64, 4, 1))),  # 64 KiB of LDS: nothing is prefetched
    "gfx1250": ((128, Tile(128, 64, 4, 2)), (256, Tile(128, 64, 4, 2))),
    "generic": ((128, Tile(64, 64, 4, 2)), (256, Tile(64, 32, 4, 1))),
}


def fp8_tile_for(arch: str, widest: int) -> Tile:
    """The tile for heads of up to `widest` columns."""
    return next(tile for limit, tile in _TILES[arch] if widest <= limit)
