"""The collectives of tensor parallelism over plain tensors, without autograd.

Rows are tokens; with sequence parallelism each rank holds a contiguous run of them, in rank order.

    all_gather           [rows, ...]     -> [size * rows, ...]      rank r's rows from r * rows on
    all_gather_last_dim  [rows, columns] -> [rows, size * columns]  rank r's columns from r * columns on
    reduce_scatter       [rows, ...]     -> [rows / size, ...]      this rank's rows of the sum
    all_reduce           any shape       -> the sum

Each starts its transfer at once and returns a `Pending`; compute that does not need the result goes between the call and
`wait()`. Every rank must call them in the same order. Empty tensors and groups of one transfer nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.tracing import Span, library_span
from primus_turbo_plugin.errors import ShapeError

Group: TypeAlias = dist.ProcessGroup
T = TypeVar("T")

# torch 2.14 renamed them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Generic[T]):
    """A result that may still be on its way.

    Args:
        finish: Gives the result once the transfers are done. It holds whatever they read, which keeps that alive until then.
        works: The transfers in flight.
        span: Of a trace, to be ended with them.
    """

    __slots__ = ("_finish", "_span", "_works")

    def __init__(self, finish: Callable[[], T], *works: dist.Work, span: Span | None = None) -> None:
        self._finish = finish
        self._works = works
        self._span = span

    def wait(self) -> T:
        """The result. On a GPU the current stream waits, not the host. To be called once."""
        if self._span is not None:
            self._span.caller_computed()
        for work in self._works:
            work.wait()
        if self._span is not None:
            self._span.end()
        return self._finish()


class _Ready(Pending[T]):
    """A result that is there."""

    __slots__ = ("_result",)

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        return self._result


def ready(result: T) -> Pending[T]:
    """A result that needs no transfer."""
    return _Ready(result)


def group_size(group: Group | None) -> int:
    """Number of ranks; no group is a group of one."""
    return 1 if group is None else group.size()


def all_gather(x: Tensor, group: Group | None) -> Pending[Tensor]:
    """Concatenates the ranks' tensors along the first dimension, in rank order.

    Args:
        x: [rows, ...], the same shape and dtype on every rank, any strides.
        group: The ranks; None for this one alone.

    Returns:
        [size * rows, ...] in x's dtype.
    """
    size = group_size(group)
    if size == 1:
        return ready(x)
    gathered = x.new_empty(size * x.shape[0], *x.shape[1:])
    if x.numel() == 0:
        return ready(gathered)
    source = x.contiguous()
    work = _all_gather(gathered, source, group=group, async_op=True)
    span = library_span("all_gather", source, group)  # type: ignore[arg-type]
    return Pending(lambda source=source: gathered, work, span=span)  # type: ignore[misc]


def all_gather_last_dim(x: Tensor, group: Group | None) -> Pending[Tensor]:
    """Concatenates the ranks' tensors along the last dimension, in rank order: one transfer and one copy.

    Args:
        x: [rows, columns], the same shape and dtype on every rank, any strides.
        group: The ranks; None for this one alone.

    Returns:
        [rows, size * columns] in x's dtype, contiguous.
    """
    size, (rows, columns) = group_size(group), x.shape
    if size == 1:
        return ready(x)
    stacked = all_gather(x.unsqueeze(0), group)
    return Pending(lambda: stacked.wait().transpose(0, 1).reshape(rows, size * columns))


def reduce_scatter(x: Tensor, group: Group | None) -> Pending[Tensor]:
    """Sums the ranks' tensors and keeps this rank's share of the rows.

    Args:
        x: [size * rows, ...], the same shape and dtype on every rank, any strides.
        group: The ranks; None for this one alone.

    Returns:
        [rows, ...] in x's dtype.

    Raises:
        ShapeError: The rows do not divide by the group's size.
    """
    size = group_size(group)
    if size == 1:
        return ready(x)
    if x.shape[0] % size:
        raise ShapeError(
            f"reduce_scatter: the {x.shape[0]} rows of {list(x.shape)} must divide by the group's size {size}. "
            "Pad the sequence to a multiple of the tensor-parallel size."
        )
    share = x.new_empty(x.shape[0] // size, *x.shape[1:])
    if x.numel() == 0:
        return ready(share)
    source = x.contiguous()
    work = _reduce_scatter(share, source, group=group, async_op=True)
    span = library_span("reduce_scatter", source, group)  # type: ignore[arg-type]
    return Pending(lambda source=source: share, work, span=span)  # type: ignore[misc]


def all_reduce(x: Tensor, group: Group | None) -> Pending[Tensor]:
    """Sums the ranks' tensors.

    Args:
        x: The same shape and dtype on every rank. A contiguous one is overwritten with the sum, so it must be the caller's own.
        group: The ranks; None for this one alone.

    Returns:
        The sum, in x's shape and dtype.
    """
    if group_size(group) == 1 or x.numel() == 0:
        return ready(x)
    total = x.contiguous()
    work = dist.all_reduce(total, group=group, async_op=True)
    return Pending(lambda: total, work, span=library_span("all_reduce", total, group))  # type: ignore[arg-type]
