"""The machine: executes a program for a batch of work-groups in lock step.

Waves that stand at the same instruction run it together; the lowest program counter goes first, so diverged waves meet
again. Work-groups of a batch share nothing but device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.architecture import Architecture
from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.program import Program
from primus_turbo_plugin.amdgcn.emulator.isa.registry import Execute, bind, check_program, lookup
from primus_turbo_plugin.amdgcn.emulator.lds import LocalMemory
from primus_turbo_plugin.amdgcn.emulator.memory import DeviceMemory
from primus_turbo_plugin.amdgcn.emulator.waits import Register, WaitCounters
from primus_turbo_plugin.amdgcn.emulator.waves import Ints, Waves
from primus_turbo_plugin.amdgcn.faults import DeadlockError, EmulationError, MissingWaitError

_RUNNING, _AT_BARRIER, _DONE, _AT_CLUSTER = 0, 1, 2, 3
# A waiting loop at a low address must not starve the wave it waits for: now and then the longest-idle waves run.
_FAIRNESS = 64
# Instructions until a transfer that signals a barrier object lands.
_TRANSFER_DELAY = 100


class BoundProgram:
    """A program with one executable function per instruction; reused by all batches of a launch."""

    def __init__(self, program: Program, arch: Architecture) -> None:
        import primus_turbo_plugin.amdgcn.emulator.isa  # noqa: F401  (fills the instruction table)

        check_program(program.instructions, arch.name)
        self.program = program
        self.arch = arch
        self.execute: list[Execute] = [bind(item, arch.name) for item in program.instructions]
        self.branches = [self._branches(item) for item in program.instructions]
        self.checked = [self._checked(item) for item in program.instructions]

    def _branches(self, instruction: Instruction) -> bool:
        opcode = lookup(instruction.opcode, self.arch.name)
        return opcode is not None and opcode.branches

    def _checked(self, instruction: Instruction) -> frozenset[Register]:
        """Registers that must hold their value when the instruction issues."""
        opcode = lookup(instruction.opcode, self.arch.name)
        if opcode is None or not opcode.loads or instruction.flag("lds"):
            return instruction.touched
        return instruction.touched - frozenset(instruction.operands[0].registers())

    @property
    def vgprs(self) -> int:
        """Vector registers the code touches, accumulation registers included."""
        used = [key[1] for item in self.program.instructions for key in item.touched if key[0].name == "VECTOR"]
        return max(used, default=0) + 1


class Machine:
    """State and main loop of one batch.

    Attributes:
        arch: The target.
        program: The code.
        waves: Registers.
        memory: Device memory.
        lds: Local memory.
        waits: Outstanding operations.
        scratch: Private memory, [wave * lane, bytes].
        pcs: Program counter of each wave.
        pc: Instruction being executed.
        counts: Executions of each instruction, in waves.
        steps: Instructions executed, each for many waves.
    """

    def __init__(
        self, bound: BoundProgram, waves: Waves, memory: DeviceMemory, lds: LocalMemory, waits: WaitCounters,
        scratch: NDArray[np.uint8], group_of: Ints, cluster_size: int = 1,
    ) -> None:  # fmt: skip
        self.bound = bound
        self.arch = bound.arch
        self.program = bound.program
        self.waves = waves
        self.memory = memory
        self.lds = lds
        self.waits = waits
        self.scratch = scratch
        self.group_of = group_of
        self.pcs = np.zeros(waves.num_waves, np.int64)
        self.pc = 0
        self.counts = [0] * len(bound.program.instructions)
        self.steps = 0
        self._state = np.zeros(waves.num_waves, np.int8)
        self._last_run = np.zeros(waves.num_waves, np.int64)
        races = lds.races
        self._signals = races.signals if races is not None else np.zeros(waves.num_waves, np.int32)
        self._waits = races.waits if races is not None else np.zeros(waves.num_waves, np.int32)
        self._later: list[tuple[int, Callable[[], None]]] = []
        self.cluster_size = cluster_size
        self._cluster_signals = np.zeros(int(group_of[-1]) + 1, np.int64)
        self._cluster_waits = np.zeros(waves.num_waves, np.int64)
        self._signalled_after = np.zeros(int(group_of[-1]) + 1, np.int32)
        self._cluster_epoch = np.zeros((int(group_of[-1]) + 1) // cluster_size, np.int64)

    # -- what control instructions do ---------------------------------------------------------------------------------

    def finish(self) -> None:
        self._state[self.waves.indices] = _DONE
        self._release_barriers()
        self._release_clusters()

    def signal_barrier(self) -> None:
        self._signals[self.waves.indices] += 1

    def wait_barrier(self) -> None:
        self._state[self.waves.indices] = _AT_BARRIER
        self._release_barriers()

    def signal_cluster(self) -> None:
        """One wave of a work-group says that the group has arrived at its cluster's barrier."""
        for wave in self.waves.indices:
            group = int(self.group_of[wave])
            self._cluster_signals[group] += 1
            self._signalled_after[group] = self._waits[wave]
        self._release_clusters()

    def wait_cluster(self) -> None:
        self._state[self.waves.indices] = _AT_CLUSTER
        self._release_clusters()

    def cluster_groups(self, wave: int, places: Sequence[int]) -> list[int]:
        """Work-groups at these places of a wave's cluster; without places, its own.

        Raises:
            EmulationError: The cluster has fewer work-groups.
        """
        group = int(self.group_of[wave])
        if not places:
            return [group]
        if places[-1] >= self.cluster_size:
            raise EmulationError(
                f"a transfer is multicast to work-group {places[-1]} of the cluster, which has {self.cluster_size}."
            )
        return [group // self.cluster_size * self.cluster_size + place for place in places]

    def _release_clusters(self) -> None:
        """Let go the waves whose whole cluster has signalled; work-groups that ended count as signalled."""
        if self.cluster_size == 1 and not (self._state == _AT_CLUSTER).any():
            return
        running = np.bincount(self.group_of, self._state != _DONE)
        signals = np.where(running == 0, np.iinfo(np.int64).max, self._cluster_signals)
        complete = signals.reshape(-1, self.cluster_size).min(axis=1)
        for cluster in np.nonzero((complete > self._cluster_epoch) & (complete != np.iinfo(np.int64).max))[0]:
            self._cluster_epoch[cluster] = complete[cluster]
            groups = np.arange(self.cluster_size) + cluster * self.cluster_size
            if self.lds.races is not None:
                self.lds.races.order_cluster(groups, self._signalled_after[groups])
        free = (self._state == _AT_CLUSTER) & (complete[self.group_of // self.cluster_size] > self._cluster_waits)
        self._cluster_waits[free] += 1
        self._state[free] = _RUNNING

    def later(self, action: Callable[[], None]) -> None:
        """Do something a number of instructions from now."""
        if self.waits.deferred:
            self._later.append((self.steps + _TRANSFER_DELAY, action))
        else:
            action()

    def _release_barriers(self) -> None:
        """Let go the waves whose whole group has signalled; waves that ended count as signalled."""
        signals = np.where(self._state == _DONE, np.iinfo(np.int32).max, self._signals)
        lowest = np.full(int(self.group_of[-1]) + 1, np.iinfo(np.int32).max, np.int32)
        np.minimum.at(lowest, self.group_of, signals)
        free = (self._state == _AT_BARRIER) & (lowest[self.group_of] > self._waits)
        self._waits[free] += 1
        self._state[free] = _RUNNING

    # -- main loop --------------------------------------------------------------------------------------------------------

    def run(self, max_steps: int) -> None:
        """Run every wave to its end.

        Raises:
            DeadlockError: No wave can go on, or more than `max_steps` instructions were executed.
            EmulationError: See `faults`.
        """
        selections = 0
        with np.errstate(all="ignore"):
            while True:
                running = np.nonzero(self._state == _RUNNING)[0]
                if running.size == 0:
                    if self._later:
                        self._land(everything=True)
                        continue
                    if (self._state == _DONE).all():
                        return
                    raise DeadlockError(self._stuck())
                selections += 1
                self._run_together(running, fair=selections % _FAIRNESS == 0)
                if self.steps > max_steps:
                    raise DeadlockError(f"more than {max_steps} instructions; {self._stuck()}")

    def _run_together(self, running: Ints, fair: bool) -> None:
        """Run the waves at one program counter until they branch or reach others."""
        positions = self.pcs[running]
        pc = int(positions[np.argmin(self._last_run[running])] if fair else positions.min())
        members = running[positions == pc]
        above = positions[positions > pc]
        limit = int(above.min()) if above.size else len(self.counts)
        self.waves.choose(members)
        self._last_run[members] = self.steps
        count, bound = len(members), self.bound
        pending = self.waits.pending
        while pc < limit:
            self.pc = pc
            self.steps += 1
            self.counts[pc] += count
            if self._later and self._later[0][0] <= self.steps:
                self._land()
            branches = bound.branches[pc]
            if branches:
                self.pcs[members] = pc + 1
            try:
                if pending and not bound.checked[pc].isdisjoint(pending):
                    instruction = self.program.instructions[pc]
                    self.waits.check(instruction, bound.checked[pc] & pending.keys())
                bound.execute[pc](self)
            except MissingWaitError:
                raise
            except EmulationError as error:
                raise type(error)(f"{self.program.instructions[pc].where}: {error}") from None
            pc += 1
            if branches:
                return
        self.pcs[members] = pc

    def _land(self, everything: bool = False) -> None:
        due = [item for item in self._later if everything or item[0] <= self.steps]
        self._later = [item for item in self._later if not (everything or item[0] <= self.steps)]
        for _, action in due:
            action()

    def _stuck(self) -> str:
        where = {
            self.program.instructions[min(int(pc), len(self.counts) - 1)].where
            for pc, state in zip(self.pcs, self._state, strict=True)
            if state != _DONE
        }
        return "waves stand at: " + "; ".join(sorted(where)[:4])
