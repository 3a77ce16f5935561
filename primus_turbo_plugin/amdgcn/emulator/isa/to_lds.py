"""Direct transfers between memory and LDS, without registers in between.

Source: CDNA "MUBUF, FLAT: LDS" (`buffer_load_* ... lds`, `global_load_lds_*`: LDS address = M0 + instruction offset + lane
times width); LLVM, Triton for gfx1250 (`global_load_async_to_lds_*`, `global_store_async_from_lds_*`: LDS address per lane).
In deferred mode the data lands at the wait that guarantees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import M0
from primus_turbo_plugin.amdgcn.emulator.isa.access import Bytes, address_of, parse_width
from primus_turbo_plugin.amdgcn.emulator.isa.global_access import (
    BUFFER_LOADS,
    addresses_of,
    bind_load,
    global_addresses,
    read_lanes,
)
from primus_turbo_plugin.amdgcn.emulator.isa.registry import CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.lds import SWITCHED_OFF
from primus_turbo_plugin.amdgcn.emulator.memory import scatter
from primus_turbo_plugin.amdgcn.emulator.waits import ASYNC, VM
from primus_turbo_plugin.amdgcn.emulator.waves import Bools, Ints

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine


def land_in_lds(machine: Machine, counter: str, addresses: Ints, data: Bytes, lanes: Bools) -> None:
    """Send data to LDS through a wait counter.

    Args:
        counter: The counter the transfer is outstanding on.
        addresses: LDS byte addresses, [chosen, element].
        data: [chosen, element, width].
        lanes: Elements that are sent, [chosen, element].
    """
    waves, lds, races = machine.waves, machine.lds, machine.lds.races
    width, pc = data.shape[-1], machine.pc
    lds.check_flat(addresses[lanes], width, "transfer")
    row = np.full(waves.num_waves, -1)
    row[waves.indices] = np.arange(waves.count)
    deferred = machine.waits.deferred
    if races is not None:
        races.write(pc, *races.units(waves.indices, addresses, lanes, width), in_flight=deferred)

    def land(who: Ints) -> None:
        rows = row[who]
        chosen = lanes[rows]
        offsets = addresses[rows] + lds.base(who)[:, None]
        scatter(lds.storage, offsets[chosen], data[rows][chosen])
        if races is not None and deferred:
            races.landed(*races.units(who, addresses[rows], chosen, width))

    machine.waits.transfer(counter, land)


def leave_lds(machine: Machine, counter: str, addresses: Ints, lanes: Bools, width: int) -> None:
    """A transfer out of LDS: what it reads must be left alone until the wait on its counter."""
    waves, races = machine.waves, machine.lds.races
    if races is None:
        machine.waits.count(counter)
        return
    row = np.full(waves.num_waves, -1)
    row[waves.indices] = np.arange(waves.count)
    races.leaving(machine.pc, *races.units(waves.indices, addresses, lanes, width))

    def left(who: Ints) -> None:
        rows = row[who]
        races.left(*races.units(who, addresses[rows], lanes[rows], width))

    machine.waits.transfer(counter, left, into_lds=False)


def _bind_lds_load(instruction: Instruction) -> Execute:
    """LDS[M0 + offset + lane * width] = memory (CDNA)."""
    buffer = instruction.opcode.startswith("buffer_")
    width = parse_width(instruction.opcode.rsplit("_", 1)[1])
    compute = addresses_of(instruction, instruction.operands, width.bytes)
    stride = max(width.bytes, 4)
    offset = instruction.number("offset")

    def execute(machine: Machine) -> None:
        waves = machine.waves
        addresses, lanes = compute(machine)
        data = read_lanes(machine, addresses, lanes, width.bytes)
        if width.bytes < 4:
            data = np.concatenate([data, np.zeros((*data.shape[:2], 4 - width.bytes), np.uint8)], axis=-1)
        start = (waves.scalar(M0).astype(np.int64) & 0xFFFFF)[:, None] + offset
        target = start + np.arange(waves.lanes) * stride
        # A lane outside the buffer still writes its zero; an inactive lane writes nothing.
        land_in_lds(machine, VM, target, data, waves.active if buffer else lanes)

    return execute


def _bind_buffer_load(instruction: Instruction) -> Execute:
    return _bind_lds_load(instruction) if instruction.flag("lds") else bind_load(instruction)


def _bind_async_load(instruction: Instruction) -> Execute:
    """LDS[address of each lane + offset] = memory (gfx1250); a lane whose LDS address is far outside does nothing."""
    target, address, base = instruction.operands
    width = parse_width(instruction.opcode.rsplit("_", 1)[1])
    compute = global_addresses(instruction, address, base, width.bytes)
    offset = instruction.number("offset")

    def execute(machine: Machine) -> None:
        addresses, lanes = compute(machine)
        places = address_of(machine, target, offset)
        lanes = lanes & (places < SWITCHED_OFF)
        data = read_lanes(machine, addresses, lanes, width.bytes)
        land_in_lds(machine, ASYNC, places, data, lanes)

    return execute


def _bind_async_store(instruction: Instruction) -> Execute:
    """memory = LDS[address of each lane + offset] (gfx1250)."""
    address, source, base = instruction.operands
    width = parse_width(instruction.opcode.rsplit("_", 1)[1])
    compute = global_addresses(instruction, address, base, width.bytes)
    offset = instruction.number("offset")

    def execute(machine: Machine) -> None:
        addresses, lanes = compute(machine)
        places = address_of(machine, source, offset)
        data = machine.lds.read(machine.pc, places, width.bytes)
        machine.memory.write(addresses[lanes], data[lanes])
        leave_lds(machine, ASYNC, places, lanes, width.bytes)

    return execute


_MODIFIERS = ("offset", "offen", "idxen", "lds")
for _archs, _names in BUFFER_LOADS.items():
    register(_names, _bind_buffer_load, family="vector memory", source="CDNA, RDNA4: MUBUF", archs=_archs, loads=True,
             meaning="D = buffer; with `lds`: LDS[M0 + offset + lane * width] = buffer", modifiers=_MODIFIERS)  # fmt: skip
register([f"global_load_lds_{name}" for name in ("ubyte", "ushort", "dword", "dwordx3", "dwordx4")], _bind_lds_load,
         family="memory to lds", source="CDNA: FLAT; LLVM: gfx950", meaning="LDS[M0 + offset + lane * width] = memory",
         archs=CDNA, modifiers=("offset",))  # fmt: skip
register([f"global_load_async_to_lds_{name}" for name in ("b8", "b32", "b64", "b128")], _bind_async_load,
         family="memory to lds", source="LLVM, Triton: gfx1250", meaning="LDS[address + offset] = memory", archs=GFX1250,
         modifiers=("offset", "scale_offset"))  # fmt: skip
register([f"global_store_async_from_lds_{name}" for name in ("b8", "b32", "b64", "b128")], _bind_async_store,
         family="memory to lds", source="LLVM, Triton: gfx1250", meaning="memory = LDS[address + offset]", archs=GFX1250,
         modifiers=("offset", "scale_offset"))  # fmt: skip
