"""Collectives of tensor parallelism that run under GEMMs: what the linears call.

    gather_gemm      y = AG(x) @ w.T       multiplied as rows arrive
    start_gather     AG(x)                 under whatever is computed until `wait()`
    gemm_scatter     y = RS(x @ w.T)       products leave as they are made
    start_scatter    RS(x)                 under whatever is computed until `wait()`

Every rank must call them in one order, with the same shapes, on one compute stream. Results of gathers lie in memory that peers
write into: they are to be read before the next gather of the same kind starts, and never to be saved.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from primus_turbo_plugin.communication import schedules
from primus_turbo_plugin.communication.collectives import Pending
from primus_turbo_plugin.communication.costs import Costs, Cut, Kind, best_cut, gemm_ms
from primus_turbo_plugin.communication.executor import Channel, Form, Multiply
from primus_turbo_plugin.communication.schedules import Program
from primus_turbo_plugin.communication.tracing import Tracer
from primus_turbo_plugin.communication.transports.base import Transport


@dataclass(frozen=True, slots=True)
class Payload:
    """Rows that travel: a plain tensor, or the codes and scales of a quantised one.

    Attributes:
        planes: Contiguous; the first dimension stands for rows.
        per_row: How many rows one row of each plane stands for.
        rows: Of this rank, and of every other.
    """

    planes: tuple[Tensor, ...]
    per_row: tuple[int, ...]
    rows: int

    @classmethod
    def plain(cls, x: Tensor) -> Payload:
        return cls((x.contiguous(),), (1,), x.shape[0])

    @property
    def forms(self) -> tuple[Form, ...]:
        return tuple(Form.of(plane, per_row) for plane, per_row in zip(self.planes, self.per_row))

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


class Overlap:
    """Overlapped collectives of one group.

    Args:
        transport: Moves the rows.
        costs: Of the device; None where none were measured.
        min_gemm_ms: GEMMs expected to be shorter run after their collective; None takes the measured limit.
        chunks: Fixes the number of chunks; None takes the cost model's.
        ring: Rows travel between neighbours only.
        tracer: Records what happens when.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        costs: Costs | None = None,
        min_gemm_ms: float | None = None,
        chunks: int | None = None,
        ring: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self.transport, self.costs, self.chunks, self.ring = transport, costs, chunks, ring
        self.merge = 1  # senders multiplied at once where `chunks` is fixed to one; benchmarks set it
        self.lanes: int | None = None  # peers that are sent to at once; None takes the costs' answer; benchmarks set it
        self.min_gemm_ms = (costs.min_gemm_ms if costs else 0.0) if min_gemm_ms is None else min_gemm_ms
        self.world_size = transport.world_size
        self._gathers, self._bulk, self._scatters = (Channel(transport, tracer) for _ in range(3))

    def too_small(self, rows: int, columns: int, contraction: int) -> str | None:
        """Why a GEMM is not worth overlapping, or None. The same on every rank, since only sizes count."""
        if self.costs is None:
            return None
        expected = gemm_ms(self.costs, rows, columns, contraction)
        if expected >= self.min_gemm_ms:
            return None
        return f"a GEMM of about {expected:.3f} ms is below min_gemm_ms {self.min_gemm_ms:g}"

    def gather_gemm(
        self,
        x: Payload,
        multiply: Multiply,
        y: Tensor,
        contraction: int,
        *,
        keep: bool = False,
        align: int = 1,
        label: str = "",
    ) -> list[Tensor]:
        """y = AG(x) @ w.T.

        Args:
            x: This rank's rows.
            multiply: The GEMM of some rows.
            y: [size * rows, columns], written.
            contraction: Of the GEMM, for the choice of chunks.
            keep: Gather the own rows as well.
            align: Cut chunks at multiples of so many rows, beside what the payload needs.
            label: For traces.

        Returns:
            The gathered planes; without `keep` this rank's own rows in them are not written.
        """
        cut = self._cut("gather", y.shape[0], y.shape[1], contraction, x.nbytes)
        rows = (x.rows,) * self.world_size
        align = max(align, _align(x))
        if self.ring:
            programs = _ring_gather_gemm_programs(rows, cut.chunks, align, keep)
        else:
            programs = _gather_gemm_programs(rows, cut.chunks, self._lanes(), align, keep, cut.merge)
        call = self._gathers.start(programs, x.planes, x.forms, multiply=multiply, output=y, label=label)
        return self._gathers.finish(call)

    def start_gather(self, x: Payload, *, label: str = "") -> Pending[list[Tensor]]:
        """AG(x): every plane [size * rows / per_row, ...]."""
        programs = _bulk_programs("ring" if self.ring else "gather", (x.rows,) * self.world_size, self._lanes())
        call = self._bulk.start(programs, x.planes, x.forms, label=label)
        return Pending(lambda: self._bulk.finish(call))

    def gemm_scatter(
        self, x: Payload, multiply: Multiply, y: Tensor, contraction: int, *, can_add: bool = False, label: str = ""
    ) -> Tensor:
        """y = RS(x @ w.T).

        Args:
            x: All rows of this rank's part of the contraction.
            multiply: The GEMM of some rows.
            y: [rows / size, columns], written.
            contraction: Of the GEMM, for the choice of chunks.
            can_add: Whether `multiply` adds rows before it rounds.
            label: For traces.
        """
        rows = (y.shape[0],) * self.world_size
        if self.ring:  # sums travel, in fp32
            programs, travels = _ring_scatter_programs(rows), torch.promote_types(y.dtype, torch.float32)
        else:
            can_add = can_add and self.world_size == 2
            cut = self._cut("scatter", x.rows, y.shape[1], contraction, y.nbytes, can_add=can_add)
            programs = _gemm_scatter_programs(rows, cut.chunks, self._lanes(), _align(x), cut.add)
            travels = y.dtype
        partial = torch.empty(x.rows, *y.shape[1:], dtype=travels, device=y.device)
        call = self._scatters.start(
            programs,
            x.planes,
            (Form(tuple(y.shape[1:]), travels),),
            input_forms=x.forms,
            multiply=multiply,
            partial=partial,
            output=y,
            label=label,
        )
        self._scatters.finish(call)
        return y

    def start_scatter(self, x: Tensor, *, label: str = "") -> Pending[Tensor]:
        """RS(x): [rows / size, ...] of x [rows, ...], straight to the owners (a ring would compute on its way)."""
        source = x.contiguous()
        y = source.new_empty(source.shape[0] // self.world_size, *source.shape[1:])
        programs = _bulk_programs("scatter", (y.shape[0],) * self.world_size, self._lanes())
        call = self._scatters.start(programs, (source,), (Form.of(source),), output=y, label=label)

        def finish() -> Tensor:
            self._scatters.finish(call)
            return y

        return Pending(finish)

    def abandon(self) -> None:
        """After an error between the two halves of a collective (out of memory, say): ends it, so that others may follow."""
        for channel in (self._gathers, self._bulk, self._scatters):
            channel.abandon()

    def _lanes(self) -> int:
        if self.lanes is not None:
            return self.lanes
        return 1 if self.costs is not None and self.costs.switched else max(1, self.world_size - 1)

    def _cut(self, kind: Kind, rows: int, columns: int, contraction: int, nbytes: int, *, can_add: bool = False) -> Cut:
        if self.chunks is not None:
            return Cut(
                self.chunks, can_add and self.chunks > 1, self.merge if self.chunks == 1 and kind == "gather" else 1
            )
        if self.costs is None:
            return Cut()
        gemm = gemm_ms(self.costs, rows, columns, contraction)
        copy = nbytes * (self.world_size - 1) / self.costs.copy_gb_s / 1e6
        return _best_cut(kind, self.costs, gemm, copy, self.world_size, can_add, rows * columns)


def _align(x: Payload) -> int:
    return max(x.per_row)


@functools.lru_cache(maxsize=1024)
def _best_cut(kind: Kind, costs: Costs, gemm: float, copy: float, world_size: int, can_add: bool, outputs: int) -> Cut:
    """The model's answer takes longer than the launch of a call, so it is remembered."""
    return best_cut(kind, costs, gemm, copy, world_size, can_add=can_add, outputs=outputs)


@functools.lru_cache(maxsize=256)
def _gather_gemm_programs(
    rows: Sequence[int], chunks: int, lanes: int, align: int, keep: bool, merge: int
) -> tuple[Program, ...]:
    make = functools.partial(schedules.all_gather_gemm, chunks=chunks, lanes=lanes, align=align, keep=keep, merge=merge)
    return tuple(make(rank, rows) for rank in range(len(rows)))


@functools.lru_cache(maxsize=256)
def _ring_gather_gemm_programs(rows: Sequence[int], chunks: int, align: int, keep: bool) -> tuple[Program, ...]:
    make = functools.partial(schedules.ring_all_gather_gemm, chunks=chunks, align=align, keep=keep)
    return tuple(make(rank, rows) for rank in range(len(rows)))


@functools.lru_cache(maxsize=256)
def _ring_scatter_programs(rows: Sequence[int]) -> tuple[Program, ...]:
    return tuple(schedules.ring_gemm_reduce_scatter(rank, rows) for rank in range(len(rows)))


@functools.lru_cache(maxsize=256)
def _gemm_scatter_programs(rows: Sequence[int], chunks: int, lanes: int, align: int, add: bool) -> tuple[Program, ...]:
    make = functools.partial(schedules.gemm_reduce_scatter, chunks=chunks, lanes=lanes, align=align, add=add)
    return tuple(make(rank, rows) for rank in range(len(rows)))


@functools.lru_cache(maxsize=256)
def _bulk_programs(kind: str, rows: Sequence[int], lanes: int) -> tuple[Program, ...]:
    if kind == "ring":
        return tuple(schedules.ring_all_gather(rank, rows) for rank in range(len(rows)))
    make = schedules.all_gather if kind == "gather" else schedules.reduce_scatter
    return tuple(make(rank, rows, lanes=lanes) for rank in range(len(rows)))
