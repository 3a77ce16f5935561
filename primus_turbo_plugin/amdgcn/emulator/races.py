"""LDS races: accesses of different waves to the same bytes that no barrier orders.

For each granule of LDS the tracker keeps the last writer and the last reader with the number of barriers that wave had
*signalled* at the time. A later access by another wave is ordered after it only if that wave has *waited* for more
barriers than that; this covers split barriers (`s_barrier_signal` .. `s_barrier_wait`) too. A transfer in flight counts as
a write that is never ordered until it lands; a transfer out of LDS as a read that goes on until it is waited for.

Clusters: a multicast transfer writes LDS of other work-groups. Barriers of one group order nothing in another; what a cluster's
barrier orders is taken off the record when it completes (`order_cluster`), and everything else of another group's is unordered.

Not understood: ordering through LDS memory barrier objects or atomics. LDS atomics are left out of the tracking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.waves import Bools, Ints

_IN_FLIGHT = 1 << 30
_MANY = -2
_NOBODY = -1


@dataclass(slots=True)
class Race:
    """One hazard, summed over its occurrences.

    Attributes:
        kind: `RAW`, `WAR` or `WAW`; in flight is added where the other side is a transfer that has not landed.
        instruction: The later access.
        other: The earlier access.
        granules: LDS granules concerned, over all work-groups and iterations.
    """

    kind: str
    instruction: Instruction
    other: Instruction
    granules: int = 0

    def __str__(self) -> str:
        return f"{self.kind} race on {self.granules} LDS granule(s): {self.instruction.where} after {self.other.where}"


class RaceTracker:
    """Detects unordered LDS accesses.

    Args:
        groups: Work-groups.
        bytes_per_group: LDS of one.
        group_of: Work-group of each wave.
        granule: Bytes per tracked unit: the narrowest LDS store of the kernel, at most 4.
        instructions: The kernel's code, to name both sides.
        clusters: Work-groups write each other's LDS.
    """

    def __init__(self, groups: int, bytes_per_group: int, group_of: Ints, granule: int,
                 instructions: tuple[Instruction, ...], clusters: bool = False) -> None:  # fmt: skip
        self._shift = granule.bit_length() - 1
        self._units = (bytes_per_group >> self._shift) + 1
        size = groups * self._units
        self._group_of = group_of
        self._instructions = instructions
        self._writer, self._reader = (np.full(size, _NOBODY, np.int32) for _ in range(2))
        self._write_mark, self._read_mark = (np.full(size, -1, np.int32) for _ in range(2))
        self._write_pc, self._read_pc, self._leaving_pc = (np.zeros(size, np.int32) for _ in range(3))
        self._leaving = np.zeros(size, bool)
        self._clusters = clusters
        self._flying = np.zeros(size if clusters else 0, np.int16)
        self.signals = np.zeros(len(group_of), np.int32)
        self.waits = np.zeros(len(group_of), np.int32)
        self.found: dict[tuple[str, int, int], Race] = {}

    def units(self, waves: Ints, addresses: Ints, active: Bools, width: int) -> tuple[Ints, Ints]:
        """The tracked units an access covers, and for each the wave that makes it; both flat."""
        span = max(width >> self._shift, 1)
        first = addresses >> self._shift
        if span > 1 and (addresses[active] & ((1 << self._shift) - 1)).any():
            span += 1
        base = first + self._group_of[waves][:, None] * self._units
        who = np.broadcast_to(waves[:, None], base.shape)
        flat, who = base[active], who[active]
        return (flat[:, None] + np.arange(span)).ravel(), np.repeat(who, span)

    def units_of_group(self, group: int, wave: int, addresses: Ints, width: int) -> tuple[Ints, Ints]:
        """As `units`, for a transfer of `wave` into the LDS of a work-group that may be another one."""
        span = max(width >> self._shift, 1)
        if span > 1 and (addresses & ((1 << self._shift) - 1)).any():
            span += 1
        flat = (addresses >> self._shift) + group * self._units
        units = (flat[:, None] + np.arange(span)).ravel()
        return units, np.full(len(units), wave, np.int64)

    def _ordered_from(self, who: Ints, units: Ints, *, written: bool) -> NDArray[np.int32]:
        """Marks from which on the last write (or read) of units is not ordered before what `who` does now."""
        waits = self.waits[who]
        if not self._clusters:
            return waits
        groups = self._group_of[self._writer[units]] if written else units // self._units
        return np.where(self._group_of[who] == groups, waits, 0)

    def order_cluster(self, groups: Ints, waited: Ints) -> None:
        """A cluster's barrier is complete: what each of its groups did before signalling is ordered for all of them.

        Args:
            groups: The work-groups.
            waited: For each, the barriers of its own that the wave that signalled had waited for.
        """
        limit = np.zeros(int(self._group_of[-1]) + 1, np.int32)
        limit[groups] = waited
        for group in groups:
            here = slice(int(group) * self._units, (int(group) + 1) * self._units)
            write, read = self._write_mark[here], self._read_mark[here]
            write[(write < limit[self._group_of[self._writer[here]]]) & (write != _IN_FLIGHT)] = -1
            read[read < limit[group]] = -1

    def read(self, pc: int, units: Ints, who: Ints) -> None:
        """Check and record a read."""
        mark = self._write_mark[units]
        in_flight = mark == _IN_FLIGHT
        late = (mark >= self._ordered_from(who, units, written=True)) & (self._writer[units] != who)
        self._report("RAW", pc, self._write_pc[units], late & ~in_flight)
        self._report("RAW, in flight,", pc, self._write_pc[units], in_flight)
        self._mark_read(pc, units, who)

    def _mark_read(self, pc: int, units: Ints, who: Ints) -> None:
        shared = (self._read_mark[units] >= self.waits[who]) & (self._reader[units] != who)
        self._reader[units] = np.where(shared, _MANY, who)
        clash = (self._reader[units] != who) & ~shared
        self._reader[units[clash]] = _MANY
        self._read_mark[units] = self.signals[who]
        self._read_pc[units] = pc

    def write(self, pc: int, units: Ints, who: Ints, changed: NDArray[np.bool_] | None = None,
              in_flight: bool = False, multicast: bool = False) -> None:  # fmt: skip
        """Check and record a write.

        Args:
            changed: For each unit, whether the stored bytes differ from what is there. Two waves storing the same
                bytes twice (replicated layouts) do no harm and are not reported.
            in_flight: The write may land at any time from now on.
            multicast: Of a transfer that every receiver issues as well: the same one in flight twice is no clash.
        """
        mark = self._write_mark[units]
        other = mark == _IN_FLIGHT
        late = (mark >= self._ordered_from(who, units, written=True)) & (self._writer[units] != who)
        if multicast:
            twin = other & (self._write_pc[units] == pc)
            other, late = other & ~twin, late & ~twin
        if changed is not None:
            late &= changed
        self._report("WAW", pc, self._write_pc[units], late & ~other)
        self._report("WAW, in flight,", pc, self._write_pc[units], other & (late | (self._writer[units] == who)))
        unread = self._ordered_from(who, units, written=False)
        early = (self._read_mark[units] >= unread) & (self._reader[units] != who)
        self._report("WAR", pc, self._read_pc[units], early)
        self._report("WAR, in flight,", pc, self._leaving_pc[units], self._leaving[units])
        self._writer[units] = who
        self._write_mark[units] = _IN_FLIGHT if in_flight else self.signals[who]
        if self._clusters and in_flight:
            self._flying[units] += 1
        self._write_pc[units] = pc

    def clash(self, pc: int, units: Ints, who: Ints, lost: NDArray[np.bool_]) -> None:
        """After a store: report waves that wrote the same unit in the same instruction with different bytes.

        Args:
            lost: For each unit, whether what is there now is not what its wave stored.
        """
        self._report("WAW", pc, np.full(len(units), pc, np.int32), lost & (self._writer[units] != who))

    def leaving(self, pc: int, units: Ints, who: Ints) -> None:
        """A transfer out of LDS begins: it may read these units at any time until it has `left`."""
        self.read(pc, units, who)
        self._leaving[units] = True
        self._leaving_pc[units] = pc

    def left(self, units: Ints, who: Ints) -> None:
        """A transfer out of LDS is over: it was an ordinary read of its wave."""
        self._leaving[units] = False
        for pc in np.unique(self._leaving_pc[units]):
            here = self._leaving_pc[units] == pc
            self._mark_read(int(pc), units[here], who[here])

    def landed(self, units: Ints, who: Ints) -> None:
        """A transfer has landed: from here on it is an ordinary write of its wave (its twin may still be in flight)."""
        if self._clusters:
            self._flying[units] -= 1
            down = self._flying[units] == 0
            units, who = units[down], who[down]
            self._writer[units] = who
        self._write_mark[units] = self.signals[who]

    def publish(self, units: Ints) -> None:
        """A transfer has landed and signalled an LDS barrier object: taken as ordered for everyone."""
        self._write_mark[units] = -1

    def _report(self, kind: str, pc: int, other: NDArray[np.int32], where: Bools) -> None:
        if not where.any():
            return
        for source, number in zip(*np.unique(other[where], return_counts=True), strict=True):
            key = (kind, pc, int(source))
            if key not in self.found:
                self.found[key] = Race(kind, self._instructions[pc], self._instructions[int(source)])
            self.found[key].granules += int(number)
