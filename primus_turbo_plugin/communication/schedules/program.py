"""The vocabulary of a schedule: what one rank does in one overlapped collective, as data.

A rank has one *compute* lane and any number of copy lanes; the operations of a lane happen in the order in which the program
lists them, and nothing else is ordered but by these four:

    Fork(lane)            the lane goes on only after everything listed before on compute
    Join(lane)            compute goes on only after everything listed before on the lane
    Signal(peer, flag)    raises a flag of `peer` to the call's sequence number, after everything listed before on its lane
    Wait(peer, flag)      its lane goes on only once the flag that `peer` raises here has reached the call's sequence number

A flag belongs to one pair of ranks: with two writers, a late signal of one call could undo an early one of the next.

Buffers, all counted in rows (tokens):

    input     the caller's tensor                      slot      where peers put rows; one of two that calls use in turn
    partial   private, for products that will travel   output    the caller's result

A program names no tensor, dtype or device, so that one checker (`check.py`) covers every use of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

COMPUTE = -1
"""The lane of the GEMMs."""

Buffer = Literal["input", "slot", "partial", "output"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows start ... stop - 1 of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Fork:
    """The lane waits for compute."""

    lane: int


@dataclass(frozen=True, slots=True)
class Join:
    """Compute waits for the lane."""

    lane: int


@dataclass(frozen=True, slots=True)
class Put:
    """Copies rows of this rank into the slot of `peer` (which may be this rank).

    Attributes:
        flag: The flag of `peer` that tells of these rows.
        round: Puts of the same round may be exchanged together by transports that know no one-sided put.
    """

    lane: int
    source: Rows
    peer: int
    target: Rows
    flag: int
    round: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Raises a flag of `peer`."""

    lane: int
    peer: int
    flag: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The lane waits for a flag that `peer` raises on this rank."""

    lane: int
    peer: int
    flag: int


@dataclass(frozen=True, slots=True)
class Gemm:
    """Multiplies `source` into `target`; with `add`, those rows are added before the one rounding. On compute."""

    source: Rows
    target: Rows
    add: Rows | None = None


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds `sources` in the order given, in fp32, and rounds once into `target`. On compute."""

    sources: tuple[Rows, ...]
    target: Rows


Op: TypeAlias = Fork | Join | Put | Signal | Wait | Gemm | Sum


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does.

    Attributes:
        rank, world_size: Whose program of how many.
        start: Issued when the call begins.
        finish: Issued when the result is wanted; what the caller computes in between is compute of its own.
        slot_rows: Rows of the slot of every rank.
        num_lanes: Copy lanes in use.
        num_flags: Flags between any two ranks.
        partial_rows: Rows of the partial buffer of this rank.
        output_rows: Rows of the output of this rank.
    """

    rank: int
    world_size: int
    start: tuple[Op, ...]
    finish: tuple[Op, ...]
    slot_rows: tuple[int, ...]
    num_lanes: int
    num_flags: int
    partial_rows: int = 0
    output_rows: int = 0

    def ops(self) -> Iterator[Op]:
        """Everything, in the order of issue."""
        yield from self.start
        yield from self.finish

    @property
    def puts(self) -> tuple[Put, ...]:
        return tuple(op for op in self.ops() if isinstance(op, Put))


def incoming(programs: tuple[Program, ...], rank: int) -> tuple[tuple[int, Put], ...]:
    """(sender, put) of all rows that others put into the slot of `rank`, by sender and in the sender's order."""
    return tuple((p.rank, put) for p in programs if p.rank != rank for put in p.puts if put.peer == rank)
