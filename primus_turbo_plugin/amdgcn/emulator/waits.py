"""Wait counters: which loads and transfers of a wave are still outstanding.

Hardware counts outstanding operations per wave (`vmcnt`, `lgkmcnt` on CDNA; `loadcnt`, `dscnt`, `asynccnt`, `tensorcnt`,
... on gfx1250) and `s_waitcnt`/`s_wait_*` stall until a counter is low enough. The emulator has no time, so it models the
worst case allowed: in *deferred* mode a transfer into LDS lands only at the wait that guarantees it, and a register being
loaded may not be touched before that wait.

A counter holds a few bits; an operation that would overflow it is not issued before an older one has returned. Compilers rely on
that: with 63 loads behind it on `vmcnt`, LLVM uses a load's result without any wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Kind
from primus_turbo_plugin.amdgcn.emulator.waves import Bools, Ints, Waves
from primus_turbo_plugin.amdgcn.faults import MissingWaitError

Register = tuple[Kind, int]

VM, LGKM = "vmcnt", "lgkmcnt"
LOAD, STORE, DS, KM, ASYNC, TENSOR = "loadcnt", "storecnt", "dscnt", "kmcnt", "asynccnt", "tensorcnt"
COUNTERS = (VM, LGKM, LOAD, STORE, DS, KM, ASYNC, TENSOR)
CAPACITY = {VM: 63, LGKM: 15, LOAD: 63, STORE: 63, DS: 63, KM: 31, ASYNC: 63, TENSOR: 63}
"""Largest value of each counter (LLVM: `AMDGPU::Waitcnt`, `IsaInfo` bit masks of gfx9 and gfx1250)."""


@dataclass(slots=True)
class _Outstanding:
    """A load whose destination registers may not be touched yet; `ticket` is 0 for waves that took no part."""

    counter: str
    ticket: Ints
    in_order: bool
    instruction: Instruction


@dataclass(slots=True)
class _Transfer:
    """A transfer into LDS that has not landed, or one out of LDS that is not over, for the waves in `waiting`."""

    ticket: Ints
    waiting: Bools
    land: Callable[[Ints], None]
    into_lds: bool


class WaitCounters:
    """Issue order of memory operations per wave.

    Args:
        waves: The register state whose chosen waves issue and wait.
        deferred: Model outstanding operations; off, everything lands at once and nothing is checked.
    """

    def __init__(self, waves: Waves, deferred: bool) -> None:
        self._waves = waves
        self.deferred = deferred
        self._issued = {name: np.zeros(waves.num_waves, np.int64) for name in COUNTERS}
        self._landed = {name: np.zeros(waves.num_waves, np.int64) for name in COUNTERS}
        self._drained = {name: np.zeros(waves.num_waves, np.int64) for name in COUNTERS}
        self._transfers: dict[str, list[_Transfer]] = {name: [] for name in COUNTERS}
        self.pending: dict[Register, list[_Outstanding]] = {}

    def issue(self, counter: str) -> Ints:
        """Count one operation of the chosen waves and return their tickets, 0 elsewhere; [wave]."""
        issued = self._issued[counter]
        issued[self._waves.chosen] += 1
        self._limit(counter)
        ticket = np.zeros_like(issued)
        ticket[self._waves.chosen] = issued[self._waves.chosen]
        return ticket

    def count(self, counter: str) -> None:
        """Count an operation nobody needs the result of (a store)."""
        if self.deferred:
            self._issued[counter][self._waves.chosen] += 1
            self._limit(counter)

    def _limit(self, counter: str) -> None:
        """An operation that would overflow its counter is issued after an older one has returned."""
        chosen, capacity = self._waves.chosen, CAPACITY[counter]
        if (self._issued[counter][chosen] - self._landed[counter][chosen] > capacity).any():
            self.wait(counter, capacity)

    def fill(self, counters: Iterable[str], registers: Iterable[Register], instruction: Instruction,
             in_order: bool = True) -> None:  # fmt: skip
        """Record a load into registers. Scalar loads return out of order: only a wait for zero covers them."""
        if not self.deferred:
            return
        for counter in counters:
            entry = _Outstanding(counter, self.issue(counter), in_order, instruction)
            for register in registers:
                others = self.pending.setdefault(register, [])
                for other in others:
                    if other.counter != counter and self._is_outstanding(other):
                        self._fault(instruction, register, other)
                others.append(entry)

    def transfer(self, counter: str, land: Callable[[Ints], None], into_lds: bool = True) -> None:
        """Record a transfer into or out of LDS; `land(wave numbers)` is called at the wait that guarantees it.

        Outside deferred mode it is called at once.
        """
        if not self.deferred:
            land(self._waves.indices)
            return
        ticket = self.issue(counter)
        self._transfers[counter].append(_Transfer(ticket, ticket > 0, land, into_lds))

    def wait(self, counter: str, limit: int) -> None:
        """The chosen waves stall until at most `limit` operations are outstanding on a counter."""
        if not self.deferred:
            return
        chosen = self._waves.chosen
        issued, landed = self._issued[counter], self._landed[counter]
        landed[chosen] = np.maximum(landed[chosen], issued[chosen] - limit)
        if limit == 0:
            self._drained[counter][chosen] = issued[chosen]
        remaining = []
        for transfer in self._transfers[counter]:
            ready = np.zeros_like(transfer.waiting)
            ready[chosen] = transfer.waiting[chosen] & (transfer.ticket[chosen] <= landed[chosen])
            if ready.any():
                transfer.land(np.nonzero(ready)[0])
                transfer.waiting &= ~ready
            if transfer.waiting.any():
                remaining.append(transfer)
        self._transfers[counter] = remaining

    def check(self, instruction: Instruction, registers: Iterable[Register]) -> None:
        """Raise if one of the registers is still being loaded for a chosen wave; forget loads that are done."""
        for register in sorted(registers, key=lambda item: item[1]):
            outstanding = self.pending.get(register)
            if not outstanding:
                continue
            for entry in outstanding:
                if self._is_outstanding(entry):
                    self._fault(instruction, register, entry)
            kept = [entry for entry in outstanding if (entry.ticket > self._reached(entry)).any()]
            if kept:
                self.pending[register] = kept
            else:
                del self.pending[register]

    @property
    def unlanded(self) -> int:
        """Transfers into LDS that no wait ever guaranteed, counted per wave."""
        return sum(int(item.waiting.sum()) for items in self._transfers.values() for item in items if item.into_lds)

    def _reached(self, entry: _Outstanding) -> Ints:
        return (self._landed if entry.in_order else self._drained)[entry.counter]

    def _is_outstanding(self, entry: _Outstanding) -> bool:
        chosen = self._waves.chosen
        return bool((entry.ticket[chosen] > self._reached(entry)[chosen]).any())

    def _fault(self, instruction: Instruction, register: Register, entry: _Outstanding) -> None:
        bank = "v" if register[0] is Kind.VECTOR else "s"
        raise MissingWaitError(
            f"{instruction.where}: {bank}{register[1]} is still being loaded; a wait on {entry.counter} is missing "
            f"between this and {entry.instruction.where}."
        )
