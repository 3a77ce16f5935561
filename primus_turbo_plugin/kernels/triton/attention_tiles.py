"""Tile shapes of the attention kernels: data, by architecture and size of the head."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """How one kernel is cut and compiled.

    Attributes:
        block_m: Queries a program or step.
        block_n: Keys a program or step.
        num_warps: Of a program.
        num_stages: Of the software pipeline.
        heads_first: Whether neighbouring programs work on other heads (True) or on other tiles of one head.
        masked_stages: As num_stages, for the loops over the few blocks that ranges mask; 0: the same.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    heads_first: bool = False
    masked_stages: int = 0


class Tiles(NamedTuple):
    """The tiles of one head size.

    Attributes:
        widest: Largest padded dim of q, k and v that they are for.
        forward: Of the forward kernel.
        dkdv: Of the gradients of keys and values.
        dq: Of the gradients of queries.
    """

    widest: int
    forward: Tile
    dkdv: Tile
    dq: Tile


_TILES: dict[str, tuple[Tiles, ...]] = {
    "sm90": (  # measured on an H200: two programs of 4 warps a multiprocessor beat one of 8
        Tiles(64, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)),
        Tiles(128, Tile(64, 64, 4, 3, heads_first=True), Tile(64, 64, 4, 2, heads_first=True), Tile(64, 64, 4, 2)),
        Tiles(192, Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
        Tiles(256, Tile(128, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 4, 1)),
    ),
    "gfx950": (
        Tiles(64, Tile(128, 64, 4, 2), Tile(64, 128, 4, 2), Tile(128, 64, 4, 2)),
        Tiles(128, Tile(128, 128, 4, 2), Tile(32, 128, 4, 2, masked_stages=1), Tile(128, 64, 4, 2)),
        Tiles(192, Tile(128, 64, 4, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
        Tiles(256, Tile(128, 64, 4, 2), Tile(32, 64, 4, 1), Tile(64, 32, 4, 2)),
    ),
    "gfx942": (  # 64 KiB of LDS: nothing is prefetched
        Tiles(128, Tile(128, 64, 4, 1), Tile(32, 128, 4, 1), Tile(128, 64, 4, 1)),
        Tiles(192, Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
        Tiles(256, Tile(64, 64, 4, 1), Tile(32, 32, 4, 1), Tile(64, 32, 4, 1)),
    ),
    "gfx1250": (
        Tiles(128, Tile(128, 64, 4, 2), Tile(32, 128, 4, 2, masked_stages=1), Tile(128, 32, 4, 2)),
        Tiles(256, Tile(128, 64, 4, 2), Tile(32, 64, 4, 2, masked_stages=1), Tile(64, 32, 4, 2)),
    ),
    "generic": (
        Tiles(128, Tile(64, 64, 4, 2), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
        Tiles(256, Tile(64, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)),
    ),
}


@functools.cache
def architecture(device_index: int) -> str:
    """Which tiles a GPU gets."""
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device_index).gcnArchName).split(":")[0]
        return name if name in _TILES else "gfx942"
    return "sm90" if torch.cuda.get_device_properties(device_index).major == 9 else "generic"


def tiles_for(arch: str, widest: int) -> Tiles:
    """The tiles for heads of up to `widest` columns."""
    return next(tiles for tiles in _TILES[arch] if widest <= tiles.widest)
