"""Which rows belong to whom, and how they are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def offsets(rows: Sequence[int]) -> tuple[int, ...]:
    """The first row of each rank, and the total: rank r holds rows offsets[r] ... offsets[r + 1] - 1."""
    return (0, *accumulate(rows))


def even_shares(total: int, world_size: int) -> tuple[int, ...]:
    """`total` rows over the ranks, the first ranks holding one more where they do not divide."""
    return tuple(total // world_size + (rank < total % world_size) for rank in range(world_size))


def chunks_of(rows: int, num_chunks: int, align: int = 1) -> tuple[tuple[int, int], ...]:
    """`num_chunks` runs (start, stop) that cover 0 ... rows - 1, cut at multiples of `align`; the later ones may be empty."""
    pieces = even_shares(-(-rows // align), num_chunks)
    starts = offsets(pieces)
    return tuple((min(a * align, rows), min(b * align, rows)) for a, b in pairwise(starts))
