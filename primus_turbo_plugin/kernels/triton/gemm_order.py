"""Which tile of y a program computes (Triton device functions)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chiplet_order(index, total, XCDS: tl.constexpr):
    """The index-th of `total` pieces of work when they are cut into XCDS runs of neighbours, one for each chiplet."""
    if XCDS > 1:
        share, rest = total // XCDS, total % XCDS
        xcd = index % XCDS
        index = xcd * share + tl.minimum(xcd, rest) + index // XCDS
    return index


@triton.jit
def tile_of(index, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, XCDS: tl.constexpr):
    """(tile_m, tile_n) of the index-th tile: GROUP tiles of M side by side, then the next tile of N, for the L2 cache.

    AMD deals out consecutive programs to XCDS chiplets in turn, and each has its own L2: the tiles are cut into XCDS runs of
    neighbours, one for each.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    index = chiplet_order(index, tiles_m * tiles_n, XCDS)
    first = index // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    within = index % (GROUP * tiles_n)
    return first + within % size, within // size
