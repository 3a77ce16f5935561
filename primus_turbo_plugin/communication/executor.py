"""Runs a schedule on a transport: buffers for its rows, and the caller's GEMM for its products.

A `Channel` is memory that peers write into, used by one kind of collective. Calls take its two slots in turn; their sequence
numbers only grow. That is all the synchronisation there is: a rank that has seen its peers' signals of call n+1 knows that they
have left call n, so the slot of call n may be written again in call n+2 (`schedules/check.py` proves it for every schedule). It
holds while the calls of a channel follow each other on one compute stream, each finished before the next starts; gathers and
scatters therefore have a channel each, and a gathered operand may be read until the next gather but one begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from primus_turbo_plugin.communication.rank_sum import rank_sum
from primus_turbo_plugin.communication.schedules.check import SLOTS
from primus_turbo_plugin.communication.schedules.program import (
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
from primus_turbo_plugin.communication.tracing import Span, Tracer
from primus_turbo_plugin.communication.transports.base import MAX_FLAGS, Arena, Expected, Transport

_ALIGNMENT = 256

Planes = Sequence[Tensor]
"""Tensors whose first dimensions stand for the same rows: codes and scales, or one plain tensor."""
Multiply = Callable[[list[Tensor], Tensor, Tensor | None], None]
"""(rows of each plane, rows of the result, rows to add or None): writes the product."""


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


@dataclass(slots=True)
class Call:
    """One run of a program.

    Attributes:
        program: What to do.
        value: Its sequence number.
        planes: By buffer, the tensors its rows are of; `slot` is this rank's.
        forms: Of the planes that travel.
        input_forms: Of the caller's.
        offsets: Byte offsets of the slot's planes in the arena of any rank.
        multiply: The caller's GEMM.
        label: For traces.
        span: Of the trace, if one is written.
    """

    program: Program
    value: int
    planes: dict[str, list[Tensor]]
    forms: tuple[Form, ...]
    input_forms: tuple[Form, ...]
    offsets: tuple[int, ...]
    multiply: Multiply | None
    label: str
    span: Span | None = None


class Channel:
    """See the module's docstring.

    Args:
        transport: Of the group.
        tracer: Records what happens when, if one is wanted.
    """

    def __init__(self, transport: Transport, tracer: Tracer | None = None) -> None:
        self.transport, self.tracer = transport, tracer
        self._arena: Arena | None = None
        self._slot_bytes = 0
        self._sequence = 0
        self._open: Call | None = None

    def start(
        self,
        programs: tuple[Program, ...],
        inputs: Planes,
        forms: tuple[Form, ...],
        *,
        input_forms: tuple[Form, ...] | None = None,
        multiply: Multiply | None = None,
        partial: Tensor | None = None,
        output: Tensor | None = None,
        label: str = "",
    ) -> Call:
        """Issues the first half of a program.

        Args:
            programs: Those of all ranks; this rank's is run.
            inputs: The caller's rows, contiguous.
            forms: Of the planes that travel, the same on every rank.
            input_forms: Of the inputs; None if they are what travels.
            multiply: The GEMM, where the program has one.
            partial: Room for products that travel, [partial_rows, ...].
            output: Where the result goes, [output_rows, ...], contiguous.
            label: For traces.
        """
        assert self._open is None, (
            f"{label}: the channel's last call, {self._open and self._open.label}, is not finished"
        )
        program = programs[self.transport.rank]
        assert program.num_flags <= MAX_FLAGS, (program.num_flags, MAX_FLAGS)
        arena, offsets = self._place(program, forms)
        self._sequence += 1
        offsets = tuple(self._sequence % SLOTS * self._slot_bytes + offset for offset in offsets)
        slot = [
            _rows_at(arena.mine, offset, form, program.slot_rows[program.rank]) for form, offset in zip(forms, offsets)
        ]
        planes = {
            "input": list(inputs),
            "slot": slot,
            "partial": [] if partial is None else [partial],
            "output": [] if output is None else [output],
        }
        call = Call(program, self._sequence, planes, forms, input_forms or forms, offsets, multiply, label)
        if self.tracer is not None:
            call.span = self.tracer.begin(label, self.transport)
        expected: list[Expected] = []
        puts: tuple[Put, ...] = ()
        if not self.transport.capabilities.one_sided:
            puts = program.puts
            expected = [
                Expected(sender, put, tuple(_part(t, put.target, f) for t, f in zip(slot, forms)))
                for sender, put in incoming(programs, program.rank)
            ]
        self.transport.begin(arena, self._sequence, expected, puts)
        self._open = call
        self._run(call, program.start)
        if call.span is not None and program.finish:
            call.span.caller_computes()
        return call

    def finish(self, call: Call) -> list[Tensor]:
        """Issues the second half; the slot's planes, to be read before this channel's next call but one."""
        assert call is self._open
        assert self._arena is not None
        self.transport.resume(self._arena)
        if call.span is not None and call.program.finish:
            call.span.caller_computed()
        self._run(call, call.program.finish)
        self.transport.settle()
        if call.span is not None:
            call.span.end()
        self._open = None
        return call.planes["slot"]

    def _place(self, program: Program, forms: tuple[Form, ...]) -> tuple[Arena, tuple[int, ...]]:
        """The arena, large enough for such calls, and where each plane begins in a slot of any rank."""
        rows, offsets, total = max(program.slot_rows), [], 0
        for form in forms:
            offsets.append(total)
            total += -(-form.rows(rows) * form.row_bytes() // _ALIGNMENT) * _ALIGNMENT
        if self._arena is None or total > self._slot_bytes:
            if self._arena is not None:
                self.transport.release(self._arena)
            self._slot_bytes = max(total, _ALIGNMENT)
            with torch.inference_mode(False):  # an evaluation may come first, and training must write into it
                self._arena = self.transport.allocate(SLOTS * self._slot_bytes)
            self._sequence = 0
        return self._arena, tuple(offsets)

    def _run(self, call: Call, ops: Sequence[Op]) -> None:
        for op in ops:
            self._issue(call, op)

    def _issue(self, call: Call, op: Op) -> None:
        transport, arena = self.transport, self._arena
        assert arena is not None
        if isinstance(op, Put):
            pieces = self._pieces(call, op)
            if call.span is not None:
                own = op.peer == call.program.rank
                name = "own rows into the slot" if own else f"put to rank {op.peer}"
                with call.span.on(op.lane, name, 0 if own else sum(t.nbytes for _, t in pieces)):
                    transport.put(arena, op, pieces)
            else:
                transport.put(arena, op, pieces)
        elif isinstance(op, Signal):
            transport.signal(arena, op.lane, op.peer, op.flag, call.value)
        elif isinstance(op, Wait):
            transport.wait(arena, op.lane, op.peer, op.flag, call.value)
        elif isinstance(op, Fork):
            transport.fork(arena, op.lane)
        elif isinstance(op, Join):
            transport.join(arena, op.lane)
        elif call.span is not None:
            with call.span.computing("gemm" if isinstance(op, Gemm) else "sum"):
                self._compute(call, op)
        else:
            self._compute(call, op)

    def _compute(self, call: Call, op: Gemm | Sum) -> None:
        if isinstance(op, Sum):
            rank_sum([self._rows(call, source)[0] for source in op.sources], self._rows(call, op.target)[0])
        elif len(op.source):
            assert call.multiply is not None
            add = None if op.add is None else self._rows(call, op.add)[0]
            call.multiply(self._rows(call, op.source), self._rows(call, op.target)[0], add)

    @staticmethod
    def _rows(call: Call, rows: Rows) -> list[Tensor]:
        planes = call.planes[rows.buffer]
        if rows.buffer in ("partial", "output"):
            return [planes[0][rows.start : rows.stop]]
        forms = call.input_forms if rows.buffer == "input" else call.forms
        return [_part(plane, rows, form) for plane, form in zip(planes, forms)]

    def _pieces(self, call: Call, op: Put) -> list[tuple[int, Tensor]]:
        """Byte offset in the peer's arena, and what goes there."""
        sources = self._rows(call, op.source)
        return [
            (offset + op.target.start // form.per_row * form.row_bytes(), source)
            for form, offset, source in zip(call.forms, call.offsets, sources)
        ]


def _part(plane: Tensor, rows: Rows, form: Form) -> Tensor:
    return plane[rows.start // form.per_row : form.rows(rows.stop)]


def _rows_at(memory: Tensor, offset: int, form: Form, rows: int) -> Tensor:
    """[rows, *tail] at a byte offset of an arena."""
    count = form.rows(rows)
    return memory[offset : offset + count * form.row_bytes()].view(form.dtype).view(count, *form.tail)
