"""Checks a schedule without running it: every order that its waits allow, not one that happened.

Several calls back to back are played through with vector clocks, as race detectors do: an operation *happens before* another
only if lanes, forks, joins and signals say so. Reported are

    deadlock      an operation whose wait nobody ends
    race          two uses of a row, at least one a write, neither of which happens before the other: rows read before they
                  arrive, a slot overwritten while it is read, an input given back too early
    result        a row of the output that is not what the collective defines: lost, doubled, misplaced, or added in another order
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from primus_turbo_plugin.communication.schedules.program import (
    COMPUTE,
    Fork,
    Gemm,
    Join,
    Program,
    Put,
    Rows,
    Signal,
    Sum,
    Wait,
)

SLOTS = 2

Expected = Callable[[int, int, int], Any]
"""(call, rank, row of the output) -> the token it must hold."""


@dataclass(frozen=True, slots=True)
class _Caller:
    """What the caller does on compute before (`write`) and after a call."""

    write: bool
    rows: Rows


@dataclass
class _Cell:
    """One row: what it holds, who wrote it last, who has read it since. An epoch is (thread, its clock then, what it did)."""

    token: Any = None
    written: tuple[int, int, str] | None = None
    read: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Item:
    op: Any
    call: int
    after: tuple[int, int] | None = None  # thread, and how many of its operations must be over


@dataclass(frozen=True, slots=True)
class CallOf:
    """One of several calls that share their slots.

    Attributes:
        programs: One a rank.
        input_rows: Rows of every rank's input.
        expected: What each row of the output must hold; None for programs that leave their result in the slot.
    """

    programs: Sequence[Program]
    input_rows: Sequence[int]
    expected: Expected | None


def check(
    programs: Sequence[Program],
    input_rows: Sequence[int],
    expected: Expected | None,
    *,
    calls: int = 4,
    slots: int = SLOTS,
) -> list[str]:
    """Plays the same call several times; see `check_calls`."""
    return check_calls([CallOf(programs, input_rows, expected)] * calls, slots=slots)


def check_calls(calls: Sequence[CallOf], *, slots: int = SLOTS) -> list[str]:
    """Plays calls that follow each other without a barrier, whatever their schedules, over one set of slots.

    Args:
        calls: In their order, which is the same on all ranks.
        slots: How many slots they use in turn.

    Returns:
        What is wrong, in words; empty if nothing is.
    """
    return _Play(calls, slots).run()


class _Play:
    def __init__(self, calls: Sequence[CallOf], slots: int) -> None:
        self.calls, self.slots = calls, slots
        world_size = len(calls[0].programs)
        self.width = 1 + max(p.num_lanes for call in calls for p in call.programs)
        num_threads = self.width * world_size
        self.clocks = [[0] * num_threads for _ in range(num_threads)]
        self.done = [0] * num_threads
        self.queues: list[deque[_Item]] = [deque() for _ in range(num_threads)]
        self.signals: dict[tuple[int, int, int, int], list[int]] = {}  # (writer, rank, flag, call) -> its clock
        self.cells: dict[tuple[Any, ...], _Cell] = {}
        self.faults: dict[str, None] = {}  # each once, in the order found
        for rank in range(world_size):
            self._issue(rank)

    def _issue(self, rank: int) -> None:
        """Fills the lanes' queues in the order of issue."""
        counts = [0] * self.width
        for number, call in enumerate(self.calls):
            program = call.programs[rank]
            given = _Caller(True, Rows("input", 0, call.input_rows[rank]))
            taken = [_Caller(False, Rows("output", 0, program.output_rows))]
            if call.expected is None:
                taken.append(_Caller(False, Rows("slot", 0, program.slot_rows[rank])))
            for op in (given, *program.ops(), *taken):
                lane = 1 + getattr(op, "lane", COMPUTE)
                after = None
                if isinstance(op, Fork):
                    after = (rank * self.width, counts[0])
                elif isinstance(op, Join):
                    after, lane = (rank * self.width + lane, counts[lane]), 0
                self.queues[rank * self.width + lane].append(_Item(op, number, after))
                counts[lane] += 1

    def run(self) -> list[str]:
        progress = True
        while progress:
            progress = False
            for thread, queue in enumerate(self.queues):
                while queue and self._may_run(thread, queue[0]):
                    self._do(thread, queue.popleft())
                    progress = True
        for thread, queue in enumerate(self.queues):
            if queue:
                self._fault(f"deadlock: {self._who(thread)} never gets past {queue[0].op} of call {queue[0].call}")
        return list(self.faults)

    def _may_run(self, thread: int, item: _Item) -> bool:
        if item.after is not None:
            return self.done[item.after[0]] >= item.after[1]
        if isinstance(item.op, Wait):
            return (item.op.peer, thread // self.width, item.op.flag, item.call) in self.signals
        return True

    def _do(self, thread: int, item: _Item) -> None:
        rank, op, clock = thread // self.width, item.op, self.clocks[thread]
        if item.after is not None:
            self._learn(clock, self.clocks[item.after[0]])
        elif isinstance(op, Wait):
            self._learn(clock, self.signals[op.peer, rank, op.flag, item.call])
        clock[thread] += 1
        self.done[thread] += 1
        if isinstance(op, Signal):
            self.signals[rank, op.peer, op.flag, item.call] = list(clock)
        elif isinstance(op, Put):
            tokens = self._read(thread, rank, op.source, item)
            self._write(thread, op.peer, op.target, item, tokens)
        elif isinstance(op, Gemm):
            added = self._read(thread, rank, op.add, item) if op.add else [None] * len(op.source)
            tokens = [("y", rank, x, c) for x, c in zip(self._read(thread, rank, op.source, item), added)]
            self._write(thread, rank, op.target, item, tokens)
        elif isinstance(op, Sum):
            parts = [self._read(thread, rank, source, item) for source in op.sources]
            self._write(thread, rank, op.target, item, [("sum", *part) for part in zip(*parts)])
        elif isinstance(op, _Caller):
            self._call(thread, rank, op, item)

    def _call(self, thread: int, rank: int, op: _Caller, item: _Item) -> None:
        if op.write:
            self._write(thread, rank, op.rows, item, [("x", item.call, rank, row) for row in range(op.rows.stop)])
            return
        tokens = self._read(thread, rank, op.rows, item)
        expected = self.calls[item.call].expected
        if op.rows.buffer == "output" and expected is not None:
            for row, token in enumerate(tokens):
                wanted = expected(item.call, rank, row)
                if token != wanted:
                    self._fault(f"result: call {item.call}, rank {rank}, row {row}: {token}, expected {wanted}")

    def _cells_of(self, rank: int, rows: Rows, call: int) -> Iterator[_Cell]:
        slot = call % self.slots if rows.buffer == "slot" else 0
        for row in range(rows.start, rows.stop):
            yield self.cells.setdefault((rank, rows.buffer, slot, row), _Cell())

    def _read(self, thread: int, rank: int, rows: Rows, item: _Item) -> list[Any]:
        tokens, now = [], self._epoch(thread, f"read by {item.op}, call {item.call}")
        for cell in self._cells_of(rank, rows, item.call):
            self._require_before(thread, cell.written, now, rank)
            cell.read.append(now)
            tokens.append(cell.token)
        return tokens

    def _write(self, thread: int, rank: int, rows: Rows, item: _Item, tokens: list[Any]) -> None:
        now = self._epoch(thread, f"written by {item.op}, call {item.call}")
        for cell, token in zip(self._cells_of(rank, rows, item.call), tokens):
            for earlier in (cell.written, *cell.read):
                self._require_before(thread, earlier, now, rank)
            cell.token, cell.written, cell.read = token, now, []
        if len(rows) != len(tokens):
            self._fault(f"result: {item.op} moves {len(tokens)} rows into {len(rows)}")

    def _require_before(
        self, thread: int, earlier: tuple[int, int, str] | None, now: tuple[int, int, str], rank: int
    ) -> None:
        if earlier is not None and self.clocks[thread][earlier[0]] < earlier[1]:
            self._fault(
                f"race on rank {rank}: {earlier[2]} ({self._who(earlier[0])}) and {now[2]} ({self._who(now[0])})"
            )

    def _epoch(self, thread: int, what: str) -> tuple[int, int, str]:
        return thread, self.clocks[thread][thread], what

    @staticmethod
    def _learn(clock: list[int], other: Sequence[int]) -> None:
        for i, value in enumerate(other):
            if value > clock[i]:
                clock[i] = value

    def _who(self, thread: int) -> str:
        rank, lane = divmod(thread, self.width)
        return f"rank {rank}, {'compute' if lane == 0 else f'lane {lane - 1}'}"

    def _fault(self, text: str) -> None:
        self.faults[text] = None


def gathered(rows: Sequence[int]) -> Expected:
    """What `all_gather_gemm` defines: every rank multiplies every row of everyone, in rank order."""
    owners = [(owner, row) for owner, count in enumerate(rows) for row in range(count)]
    return lambda call, rank, row: ("y", rank, ("x", call, *owners[row]), None)


def scattered(rows: Sequence[int], *, gemm: bool = True, add: bool = False) -> Expected:
    """What `gemm_reduce_scatter` (or, without `gemm`, `reduce_scatter`) defines: the ranks' products added in rank order."""
    first = [sum(rows[:rank]) for rank in range(len(rows))]

    def expected(call: int, rank: int, row: int) -> Any:
        def term(sender: int) -> Any:
            x = ("x", call, sender, first[rank] + row)
            return ("y", sender, x, None) if gemm else x

        if add:
            return ("y", rank, ("x", call, rank, first[rank] + row), term(1 - rank))
        return ("sum", *(term(sender) for sender in range(len(rows))))

    return expected
