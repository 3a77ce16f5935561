"""Launching a compiled kernel in the emulator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.emulator.arguments import place_arguments
from primus_turbo_plugin.amdgcn.emulator.lds import LocalMemory
from primus_turbo_plugin.amdgcn.emulator.loader import Grid, KernelArguments, initialise, load_arguments
from primus_turbo_plugin.amdgcn.emulator.machine import BoundProgram, Machine
from primus_turbo_plugin.amdgcn.emulator.memory import DeviceMemory
from primus_turbo_plugin.amdgcn.emulator.races import Race, RaceTracker
from primus_turbo_plugin.amdgcn.emulator.waits import WaitCounters
from primus_turbo_plugin.amdgcn.emulator.waves import Ints, Waves
from primus_turbo_plugin.amdgcn.faults import RaceError
from primus_turbo_plugin.errors import UnsupportedError

_BATCH_BYTES = 512 << 20
_MAX_STEPS = 20_000_000


@dataclass(slots=True)
class LaunchReport:
    """What happened during an emulated launch. Nothing in it is a measurement of hardware.

    Attributes:
        races: LDS hazards, if they were tracked.
        executed: Times each opcode was executed, counted in waves.
        steps: Instructions the emulator executed, each for many waves.
        unlanded: Transfers into LDS that no wait ever guaranteed (harmless if nothing read them).
        seconds: Time the emulation took on this machine's CPU.
    """

    races: list[Race] = field(default_factory=list)
    executed: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    unlanded: int = 0
    seconds: float = 0.0


def _grid(grid: int | Sequence[int]) -> Grid:
    sizes = [grid] if isinstance(grid, int) else list(grid)
    sizes += [1] * (3 - len(sizes))
    return sizes[0], sizes[1], sizes[2]


def _batches(compiled: CompiledKernel, groups: int, vgprs: int, batch: int | None, cluster: int) -> list[Ints]:
    """Work-group numbers of each batch; by default as many as fit a memory budget."""
    wave_bytes = vgprs * compiled.architecture.wave * 4
    group_bytes = compiled.num_warps * wave_bytes + compiled.shared * 25 + 1
    size = -(-(batch or max(_BATCH_BYTES // group_bytes, 1)) // cluster) * cluster
    return [np.arange(start, min(start + size, groups)) for start in range(0, groups, size)]


def launch(
    compiled: CompiledKernel,
    grid: int | Sequence[int],
    args: Mapping[str, Any] | Sequence[Any],
    *,
    defer: bool = True,
    race: bool = True,
    on_race: Literal["raise", "report"] = "raise",
    batch: int | None = None,
    max_steps: int = _MAX_STEPS,
) -> LaunchReport:
    """Emulate a launch; arrays among the arguments are updated in place.

    Args:
        compiled: The kernel.
        grid: Work-groups in x, y, z.
        args: Arguments by name, or in order without the compile-time constants. numpy arrays and CPU tensors are memory,
            everything else is a scalar.
        defer: Transfers into LDS land only at the wait that guarantees them, and registers may not be used before the
            wait for their load. Off, everything completes at once.
        race: Track LDS hazards between waves.
        on_race: Raise at the end of the launch, or only report.
        batch: Work-groups emulated together; all of them if the kernel synchronises across work-groups.
        max_steps: Limit on executed instructions.

    Returns:
        The report.

    Raises:
        EmulationError: Out-of-bounds access, missing wait, race, deadlock, unknown instruction, ...
        ShapeError: The arguments do not fit the kernel.
    """
    if "__ockl_printf" in compiled.asm or "__ockl_fprintf" in compiled.asm:  # labels of the code that was inlined
        raise UnsupportedError(
            f"amdgcn: kernel {compiled.name!r} calls the host (device_print, device_assert), which is not emulated. Remove the "
            "call; store what it would print."
        )
    if compiled.metadata.get("global_scratch_size"):
        raise UnsupportedError("amdgcn: kernels with a global scratch buffer of Triton's are not emulated.")
    started = time.perf_counter()
    shape = _grid(grid)
    memory = DeviceMemory()
    values, arrays = place_arguments(compiled, args, memory)
    threads = compiled.num_warps * compiled.architecture.wave
    arguments = load_arguments(memory, compiled.descriptor, values, shape, threads, compiled.shared)
    bound = BoundProgram(compiled.program, compiled.architecture)
    report = LaunchReport()
    cluster = int(compiled.metadata.get("num_ctas", 1))
    for groups in _batches(compiled, shape[0] * shape[1] * shape[2] * cluster, bound.vgprs, batch, cluster):
        machine = _machine(compiled, bound, memory, arguments, groups, shape, defer, race)
        machine.run(max_steps)
        _collect(report, machine)
    arrays.copy_back()
    report.seconds = time.perf_counter() - started
    if report.races and on_race == "raise":
        listed = "\n  ".join(str(item) for item in report.races[:8])
        raise RaceError(f"kernel {compiled.name!r} on {compiled.arch}: {len(report.races)} LDS hazard(s):\n  {listed}")
    return report


def _machine(compiled: CompiledKernel, bound: BoundProgram, memory: DeviceMemory, arguments: KernelArguments, groups: Ints,
             grid: Grid, defer: bool, race: bool) -> Machine:  # fmt: skip
    """A machine ready to run a batch of work-groups."""
    from primus_turbo_plugin.amdgcn.emulator.isa.access import narrowest_store

    arch, per_group = compiled.architecture, compiled.num_warps
    cluster = int(compiled.metadata.get("num_ctas", 1))
    num_waves = len(groups) * per_group
    waves = Waves(arch, num_waves, max(bound.vgprs, 1))
    group_of = np.repeat(np.arange(len(groups)), per_group)
    races = None
    if race and (per_group > 1 or cluster > 1) and compiled.shared:
        granule = narrowest_store(compiled.program.instructions)
        code = compiled.program.instructions
        races = RaceTracker(len(groups), compiled.shared, group_of, granule, code, clusters=cluster > 1)
    lds = LocalMemory(waves, group_of, len(groups), compiled.shared, races)
    scratch = np.full((num_waves * arch.wave, compiled.descriptor.scratch_bytes), 0xFF, np.uint8)
    initialise(waves, arch, compiled.descriptor, arguments, groups, grid, per_group, cluster)
    return Machine(bound, waves, memory, lds, WaitCounters(waves, defer), scratch, group_of, cluster)


def _collect(report: LaunchReport, machine: Machine) -> None:
    for instruction, count in zip(machine.program.instructions, machine.counts, strict=True):
        if count:
            report.executed[instruction.opcode] += count
    report.steps += machine.steps
    report.unlanded += machine.waits.unlanded
    if machine.lds.races is not None:
        known = {(item.kind, item.instruction.line, item.other.line): item for item in report.races}
        for race in machine.lds.races.found.values():
            key = (race.kind, race.instruction.line, race.other.line)
            if key in known:
                known[key].granules += race.granules
            else:
                report.races.append(race)
