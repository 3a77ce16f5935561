"""A program made ready to run: every address, view and handle that does not change from call to call is found once.

A `Plan` belongs to one program, one slot of one arena and the forms of its rows. It is a list of steps, closures over what the
operation needs, so that a call costs the host little more than the driver's own calls. What does change (the caller's tensors,
the sequence number) is in the `Call` that each step is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from primus_turbo_plugin.communication.rank_sum import rank_sum
from primus_turbo_plugin.communication.schedules.program import (
    COMPUTE,
    Buffer,
    Fork,
    Gemm,
    Join,
    Op,
    Program,
    Put,
    Rows,
    Signal,
    Sum,
    Wait,
    incoming,
)
from primus_turbo_plugin.communication.tracing import Span
from primus_turbo_plugin.communication.transports.base import MAX_FLAGS, Arena, Exchange, Expected, Piece

if TYPE_CHECKING:
    from primus_turbo_plugin.communication.transports.base import Transport

Planes = Sequence[Tensor]
"""Tensors whose first dimensions stand for the same rows: codes and scales, or one plain tensor."""
Multiply = Callable[[list[Tensor], Tensor, "Tensor | None"], None]
"""(rows of each plane, rows of the result, rows to add or None): writes the product."""
Step: TypeAlias = "Callable[[Call], None]"


@dataclass(frozen=True, slots=True)
class Form:
    """What a plane's rows are.

    Attributes:
        tail: Shape of one row of the plane.
        dtype: Of its elements.
        per_row: How many rows of the schedule one row of the plane stands for (32 for scales of 32x32 blocks).
    """

    tail: tuple[int, ...]
    dtype: torch.dtype
    per_row: int = 1

    def rows(self, rows: int) -> int:
        return -(-rows // self.per_row)

    def row_bytes(self) -> int:
        return math.prod(self.tail, start=self.dtype.itemsize)

    @classmethod
    def of(cls, t: Tensor, per_row: int = 1) -> Form:
        return cls(tuple(t.shape[1:]), t.dtype, per_row)

    def at(self, memory: Tensor, offset: int, rows: int) -> Tensor:
        """[rows, *tail] at a byte offset of an arena."""
        count = self.rows(rows)
        return memory[offset : offset + count * self.row_bytes()].view(self.dtype).view(count, *self.tail)


@dataclass(slots=True)
class Call:
    """One run of a plan.

    Attributes:
        plan: What to do.
        value: What its signals raise flags to, and its waits wait for.
        planes: By buffer, the tensors its rows are of; `slot` is this rank's.
        multiply: The caller's GEMM.
        label: For traces and errors.
        span: Of the trace, if one is written.
        cuts: By buffer, its planes cut into the pieces that are multiplied and added.
    """

    plan: Plan
    value: int
    planes: dict[Buffer, list[Tensor]]
    multiply: Multiply | None
    label: str
    span: Span | None = None
    cuts: dict[Buffer, list[tuple[Tensor, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's docstring.

    Attributes:
        programs: Those of all ranks; kept, so that their identity may stand for them.
        program: This rank's.
        start, finish: Its steps.
        slot: This rank's planes.
        exchange: What a transport is told when a call begins.
    """

    programs: tuple[Program, ...]
    program: Program
    start: tuple[Step, ...]
    finish: tuple[Step, ...]
    slot: list[Tensor]
    exchange: Exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where a plan's rows and flags lie.

    Attributes:
        offsets: Byte offsets of the slot's planes in the arena of any rank.
        flag_set: Which of the arena's sets of flags it uses.
        clears: Zero those flags at the end, so that the same numbers can be used again (a captured graph does).
        traced: Steps tell `Call.span` of themselves.
    """

    offsets: tuple[int, ...]
    flag_set: int
    clears: bool
    traced: bool


def make_plan(
    programs: tuple[Program, ...],
    transport: Transport,
    arena: Arena,
    layout: Layout,
    forms: tuple[Form, ...],
    input_forms: tuple[Form, ...],
    input_rows: int,
) -> Plan:
    """Lowers this rank's program.

    Args:
        programs: Those of all ranks.
        transport: Makes the steps of copies, signals and waits.
        arena: Memory of the slots.
        layout: Where in it.
        forms: Of the planes that travel.
        input_forms: Of the caller's.
        input_rows: Of the caller's tensors, as rows of the schedule.
    """
    program = programs[transport.rank]
    with torch.inference_mode(False), torch.no_grad():  # an evaluation may come first, and training uses the same views
        slot = [form.at(arena.mine, at, program.slot_rows[program.rank]) for form, at in zip(forms, layout.offsets)]
        lowering = _Lowering(program, transport, arena, layout, forms, input_forms, slot, input_rows)
        start, finish = tuple(lowering.steps(program.start)), list(lowering.steps(program.finish))
    if layout.clears:
        finish.append(lambda call: transport.clear(arena, layout.flag_set))
    return Plan(programs, program, start, tuple(finish), slot, lowering.exchange(programs))


class _Lowering:
    def __init__(
        self,
        program: Program,
        transport: Transport,
        arena: Arena,
        layout: Layout,
        forms: tuple[Form, ...],
        input_forms: tuple[Form, ...],
        slot: list[Tensor],
        input_rows: int,
    ) -> None:
        self.program, self.transport, self.arena, self.layout = program, transport, arena, layout
        self.forms, self.input_forms, self.slot = forms, input_forms, slot
        self.extent: dict[Buffer, int] = {
            "input": input_rows,
            "partial": program.partial_rows,
            "output": program.output_rows,
        }
        self.first_flag = layout.flag_set * MAX_FLAGS
        self.cuts = {buffer: cut for buffer in self.extent if len(cut := self._cut(buffer)) > 1}

    def steps(self, ops: Iterable[Op]) -> Iterator[Step]:
        """One step an operation; forks that follow each other are one."""
        if ops is self.program.start:
            yield from [self._cutter(buffer, cut) for buffer, cut in list(self.cuts.items())]
        for kind, run in groupby(ops, type):
            if kind is Fork:
                yield self.transport.fork_step(self.arena, tuple(op.lane for op in run))  # type: ignore[union-attr]
            else:
                yield from map(self._step, run)

    def exchange(self, programs: tuple[Program, ...]) -> Exchange:
        """What a two-sided transport must know beforehand, and what a watchdog looks at."""
        if not self.transport.capabilities.one_sided:
            arriving = tuple(
                Expected(
                    sender,
                    put,
                    tuple(_part(t, put.target, form) for t, form in zip(self.slot, self.forms, strict=True)),
                )
                for sender, put in incoming(programs, self.program.rank)
            )
            return Exchange(arriving, self.program.puts, ())
        waits = {(op.peer, op.flag) for op in self.program.ops() if isinstance(op, Wait)}
        return Exchange((), (), () if self.layout.clears else tuple(sorted(waits)))

    def _step(self, op: Op) -> Step:
        transport, arena, first = self.transport, self.arena, self.first_flag
        if isinstance(op, Put):
            pieces = tuple(self._pieces(op))
            return self._traced_put(op, transport.put_step(arena, op, pieces), sum(piece.nbytes for piece in pieces))
        if isinstance(op, Signal):
            return transport.signal_step(arena, op.lane, op.peer, first + op.flag)
        if isinstance(op, Wait):
            return transport.wait_step(arena, op.lane, op.peer, first + op.flag)
        if isinstance(op, Join):
            return transport.join_step(arena, op.lane)
        assert isinstance(op, Gemm | Sum), op
        return self._traced_compute(op, self._multiplies(op) if isinstance(op, Gemm) else self._adds(op))

    def _traced_put(self, op: Put, step: Step, nbytes: int) -> Step:
        if not self.layout.traced:
            return step
        own = op.peer == self.program.rank
        name, nbytes = ("own rows into the slot", 0) if own else (f"put to rank {op.peer}", nbytes)

        def traced(call: Call) -> None:
            assert call.span is not None
            with call.span.on(op.lane, name, nbytes):
                step(call)

        return traced

    def _traced_compute(self, op: Gemm | Sum, step: Step) -> Step:
        if not self.layout.traced:
            return step

        def traced(call: Call) -> None:
            assert call.span is not None
            with call.span.computing("gemm" if isinstance(op, Gemm) else "sum"):
                step(call)

        return traced

    def _multiplies(self, op: Gemm) -> Step:
        if not len(op.source):
            return lambda call: None
        source, target = self._reader(op.source), self._reader(op.target)
        add = None if op.add is None else self._reader(op.add)

        def step(call: Call) -> None:
            assert call.multiply is not None
            call.multiply(source(call), target(call)[0], None if add is None else add(call)[0])

        return step

    def _adds(self, op: Sum) -> Step:
        sources, target = [self._reader(rows) for rows in op.sources], self._reader(op.target)
        return lambda call: rank_sum([source(call)[0] for source in sources], target(call)[0])

    def _cut(self, buffer: Buffer) -> tuple[tuple[int, int], ...]:
        """The pieces of a buffer that are multiplied or added, where together they are all of it: torch makes them at once."""
        used = set()
        for op in self.program.ops():
            if isinstance(op, Gemm | Sum):
                sources = (op.source, *([op.add] if op.add else ())) if isinstance(op, Gemm) else op.sources
                used |= {(r.start, r.stop) for r in (*sources, op.target) if r.buffer == buffer and len(r)}
        pieces = tuple(sorted(used))
        ends = (0, *(stop for _, stop in pieces))
        whole = all(start == end for (start, _), end in zip(pieces, ends)) and ends[-1] == self.extent[buffer]
        return pieces if whole else ()

    def _cutter(self, buffer: Buffer, cut: tuple[tuple[int, int], ...]) -> Step:
        forms = self.input_forms if buffer == "input" else self.forms[:1]
        sizes = [[form.rows(stop) - start // form.per_row for start, stop in cut] for form in forms]
        if any(sum(size) != form.rows(cut[-1][1]) for size, form in zip(sizes, forms)):  # cut within a row of scales
            del self.cuts[buffer]
            return lambda call: None

        def step(call: Call) -> None:
            call.cuts[buffer] = [torch.split(plane, size) for plane, size in zip(call.planes[buffer], sizes)]

        return step

    def _reader(self, rows: Rows) -> Callable[[Call], list[Tensor]]:
        """Gives the rows of each plane: views of a slot are made now, others of what a call brings."""
        buffer = rows.buffer
        if buffer == "slot":
            views = [_part(plane, rows, form) for plane, form in zip(self.slot, self.forms)]
            return lambda call: views
        if rows.start == 0 and rows.stop == self.extent[buffer]:
            return lambda call: call.planes[buffer]
        if (rows.start, rows.stop) in self.cuts.get(buffer, ()):
            piece = self.cuts[buffer].index((rows.start, rows.stop))
            return lambda call: [plane[piece] for plane in call.cuts[buffer]]
        if buffer == "input":
            forms = self.input_forms
            return lambda call: [_part(plane, rows, form) for plane, form in zip(call.planes["input"], forms)]
        start, stop = rows.start, rows.stop
        return lambda call: [call.planes[buffer][0][start:stop]]

    def _pieces(self, op: Put) -> Iterator[Piece]:
        """What goes where, a piece a plane."""
        source_forms = self.input_forms if op.source.buffer == "input" else self.forms
        for plane, (source_form, form, at) in enumerate(zip(source_forms, self.forms, self.layout.offsets)):
            first, last = op.source.start // source_form.per_row, source_form.rows(op.source.stop)
            row_bytes = form.row_bytes()
            yield Piece(
                buffer=op.source.buffer,
                plane=plane,
                rows=(first, last),
                source=first * row_bytes,
                nbytes=(last - first) * row_bytes,
                target=at + op.target.start // form.per_row * row_bytes,
            )


def _part(plane: Tensor, rows: Rows, form: Form) -> Tensor:
    return plane[rows.start // form.per_row : form.rows(rows.stop)]


def handshake_steps(transport: Transport, arena: Arena, flag_set: int) -> tuple[Step, ...]:
    """Compute goes on once every rank has come here, and has left every call before."""
    flag, peers = flag_set * MAX_FLAGS, [rank for rank in range(transport.world_size) if rank != transport.rank]
    steps = [transport.fork_step(arena, (0,))]
    steps += [transport.signal_step(arena, 0, peer, flag) for peer in peers]
    steps += [transport.wait_step(arena, COMPUTE, peer, flag) for peer in peers]
    steps += [lambda call: transport.clear(arena, flag_set), transport.join_step(arena, 0)]
    return tuple(steps)
