"""Runs a schedule on a transport: buffers for its rows, and the caller's GEMM for its products.

A `Channel` is memory that peers write into, used by one kind of collective. Calls take its two slots in turn; their sequence
numbers only grow. That is all the synchronisation there is: a rank that has seen its peers' signals of call n+1 knows that they
have left call n, so the slot of call n may be written again in call n+2 (`schedules/check.py` proves it for every schedule). It
holds while the calls of a channel follow each other on one compute stream, each finished before the next starts; gathers and
scatters therefore have a channel each. A gathered operand may be read until the next gather begins: larger rows get other memory.

Calls that a CUDA graph captures are replayed with the numbers they were captured with. They raise flags of their own from 0 to 1,
each slot its set, and zero them when the call ends, by when every signal of the call has been waited for. Two slots in turn keep
apart what follows each other within a capture; since nobody knows what is replayed after what, the first call of a capture and
every later call outside one begin with a handshake of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from primus_turbo_plugin.communication.plan import (
    Call,
    Form,
    Layout,
    Multiply,
    Plan,
    Planes,
    Step,
    handshake_steps,
    make_plan,
)
from primus_turbo_plugin.communication.schedules.check import SLOTS
from primus_turbo_plugin.communication.schedules.program import Program
from primus_turbo_plugin.communication.tracing import Tracer
from primus_turbo_plugin.communication.transports.base import MAX_FLAGS, Arena, Transport
from primus_turbo_plugin.errors import UnsupportedError

__all__ = ["Call", "Channel", "Form", "Multiply", "Planes"]

_ALIGNMENT = 256
_MOST_PLANS = 512
_HANDSHAKE = 1 + SLOTS
"""Sets of flags: 0 counts eager calls, 1 and 2 belong to captured calls of either slot, this one to handshakes."""


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
        self._sequence = 0  # of eager calls
        self._captured = 0  # calls in graphs
        self._capture = 0  # the last one seen
        self._kept: list[Arena] = []  # graphs have their addresses
        self._plans: dict[Hashable, Plan] = {}
        self._handshake: tuple[Step, ...] = ()
        self._open: Call | None = None
        self._failed = ""

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
            programs: Those of all ranks, the same object for the same programs; this rank's is run.
            inputs: The caller's rows, contiguous.
            forms: Of the planes that travel, the same on every rank.
            input_forms: Of the inputs; None if they are what travels.
            multiply: The GEMM, where the program has one.
            partial: Room for products that travel, [partial_rows, ...].
            output: Where the result goes, [output_rows, ...], contiguous.
            label: For traces and errors.

        Raises:
            UnsupportedError: An earlier call of this channel did not come to its end; or there is no memory.
        """
        if self._open is not None or self._failed:
            raise UnsupportedError(self._unusable(label))
        capture = self.transport.capture_id()
        traced = self.tracer is not None and not capture  # marks within a graph could not be read
        span = self.tracer.begin(label, self.transport) if traced and self.tracer is not None else None
        plan = self._plan(programs, inputs, forms, input_forms or forms, bool(capture), span is not None)
        if capture:
            self._captured += 1
        else:
            self._sequence += 1
        planes = {
            "input": list(inputs),
            "slot": plan.slot,
            "partial": [] if partial is None else [partial],
            "output": [] if output is None else [output],
        }
        call = Call(plan, 1 if capture else self._sequence, planes, multiply, label, span)  # type: ignore[arg-type]
        assert self._arena is not None
        self.transport.begin(self._arena, call.value, plan.exchange, label)
        self._open = call
        if self._captured and (not capture or capture != self._capture):
            self._capture = capture
            self._run(call, self._handshake, value=1)
        self._run(call, plan.start)
        if span is not None and plan.program.finish:
            span.caller_computes()
        return call

    def finish(self, call: Call) -> list[Tensor]:
        """Issues the second half; the slot's planes, to be read before this channel's next call."""
        assert call is self._open
        assert self._arena is not None
        self.transport.resume(self._arena)
        if call.span is not None and call.plan.program.finish:
            call.span.caller_computed()
        self._run(call, call.plan.finish)
        self.transport.settle()
        if call.span is not None:
            call.span.end()
        self._open = None
        return call.plan.slot

    def abandon(self) -> None:
        """Ends a call whose caller has failed between its halves: what peers expect has been sent, so only the result is lost."""
        call = self._open
        if call is not None and not self._failed:
            with contextlib.suppress(RuntimeError):  # which is then why the channel cannot go on
                self.finish(call)

    def _run(self, call: Call, steps: Sequence[Step], value: int | None = None) -> None:
        own = call.value
        call.value = own if value is None else value
        try:
            for step in steps:
                step(call)
        except BaseException as error:
            self._failed = f"{call.label or 'a collective'} failed on this rank ({type(error).__name__}: {error})"
            raise
        call.value = own

    def _unusable(self, label: str) -> str:
        what = self._failed or f"{self._open and self._open.label} was begun and never finished"
        return (
            f"{label or 'overlapped collective'}: the overlap of this group cannot go on: {what}, so the ranks no longer agree "
            "about what has been sent. Look for that error, and start again from a checkpoint."
        )

    def _plan(
        self,
        programs: tuple[Program, ...],
        inputs: Planes,
        forms: tuple[Form, ...],
        input_forms: tuple[Form, ...],
        captures: bool,
        traced: bool,
    ) -> Plan:
        """The plan of this call, from those made before where there is one."""
        for _ in range(2):  # the arena may change, and the slot's turn with it
            slot = (self._captured if captures else self._sequence + 1) % SLOTS
            key = (id(programs), forms, input_forms, captures, slot, traced)
            plan = self._plans.get(key)
            if plan is not None:
                return plan
            arena, offsets = self._place(programs, forms, captures)
            if slot == (self._captured if captures else self._sequence + 1) % SLOTS:
                break
        program = programs[self.transport.rank]
        if program.num_flags > MAX_FLAGS:
            raise UnsupportedError(
                f"overlapped collective: {program.world_size} ranks of a ring need {program.num_flags} flags for their chunks, "
                f"and there are {MAX_FLAGS}. Set communication.chunks to {max(1, MAX_FLAGS // program.world_size)}."
            )
        layout = Layout(
            offsets=tuple(slot * self._slot_bytes + offset for offset in offsets),
            flag_set=1 + slot if captures else 0,
            clears=captures,
            traced=traced,
        )
        rows = inputs[0].shape[0] * input_forms[0].per_row if inputs else 0
        if len(self._plans) >= _MOST_PLANS:  # of ever changing shapes
            self._plans.clear()
        plan = make_plan(programs, self.transport, arena, layout, forms, input_forms, rows)
        self._plans[key] = plan
        return plan

    def _place(
        self, programs: tuple[Program, ...], forms: tuple[Form, ...], captures: bool
    ) -> tuple[Arena, tuple[int, ...]]:
        """The arena, large enough for such calls, and where each plane begins in a slot of any rank."""
        rows, offsets, total = max(programs[0].slot_rows), [], 0
        for form in forms:
            offsets.append(total)
            total += -(-form.rows(rows) * form.row_bytes() // _ALIGNMENT) * _ALIGNMENT
        if self._arena is None or total > self._slot_bytes:
            if captures:
                raise UnsupportedError(
                    f"overlapped collective: a CUDA graph is being captured, and the {SLOTS} x {total:,} bytes of this call are "
                    "not there yet; ranks cannot agree about memory during a capture. Run the same shapes once before it."
                )
            self._grow(max(total, _ALIGNMENT))
        assert self._arena is not None
        return self._arena, tuple(offsets)

    def _grow(self, slot_bytes: int) -> None:
        arena, self._arena = self._arena, None
        self._plans.clear()  # they and the handshake hold the arena, whose memory is wanted for the next
        self._handshake, self._sequence, self._slot_bytes = (), 0, slot_bytes
        if arena is not None and self._captured:
            self._kept.append(arena)
        elif arena is not None:
            self.transport.release(arena)
        del arena
        with torch.inference_mode(False):  # an evaluation may come first, and training must write into it
            self._arena = self.transport.allocate(SLOTS * slot_bytes)
        self._handshake = handshake_steps(self.transport, self._arena, _HANDSHAKE)
