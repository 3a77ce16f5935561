"""Sums of parts that each cover some rows, without zeroing or adding where one part is all there is."""

from __future__ import annotations

import torch
from torch import Tensor


class Written:
    """Which of a tensor's rows hold something already.

    Args:
        rows: How many there are.
    """

    def __init__(self, rows: int) -> None:
        self._free = [(0, rows)]

    def any_of(self, rows: slice) -> bool:
        """Whether any of these does."""
        return not any(start <= rows.start and rows.stop <= stop for start, stop in self._free)

    def gaps(self, rows: slice) -> list[slice]:
        """Those of these rows that don't."""
        cut = [(max(start, rows.start), min(stop, rows.stop)) for start, stop in self._free]
        return [slice(start, stop) for start, stop in cut if start < stop]

    def add(self, rows: slice) -> None:
        """Now these do."""
        pieces = []
        for start, stop in self._free:
            pieces += [(start, min(stop, rows.start)), (max(start, rows.stop), stop)]
        self._free = [(start, stop) for start, stop in pieces if start < stop]


class Summed:
    """A gradient whose parts arrive in any number: nothing is zeroed or added where one part is all there is.

    Args:
        like: [batch, tokens, heads, dim]: shape and device.
        dtype: To accumulate in.
        into: Where it must end up, of that shape and dtype; None where it may be a part itself.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> None:
        self._like, self._dtype, self._sum = like, dtype, into
        self._written = Written(like.shape[1])

    def add(self, rows: slice, part: Tensor) -> None:
        """Adds a part for some of the tokens."""
        if self._sum is None:
            if rows == slice(0, self._like.shape[1]):
                self._sum = part
                self._written.add(rows)
                return
            self._sum = torch.empty_like(self._like, dtype=self._dtype)
        target = self._sum[:, rows]
        if self._written.any_of(rows):
            self._clear(rows)
            target += part
        else:
            target.copy_(part)
        self._written.add(rows)

    def finish(self) -> Tensor:
        """The sum, 0 where there was no part."""
        if self._sum is None:
            self._sum = torch.empty_like(self._like, dtype=self._dtype)
        self._clear(slice(0, self._like.shape[1]))
        return self._sum

    def _clear(self, rows: slice) -> None:
        assert self._sum is not None
        for gap in self._written.gaps(rows):
            self._sum[:, gap] = 0
            self._written.add(gap)
