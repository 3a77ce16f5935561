"""Scratch: a lane's private memory, used for register spills and local arrays.

Source: CDNA, RDNA4 "Flat scratch". The address is scalar + vector + instruction offset, private to the lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Kind, Operand
from primus_turbo_plugin.amdgcn.emulator.isa.access import load_registers, parse_width, store_bytes
from primus_turbo_plugin.amdgcn.emulator.isa.registry import CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import scalar_reader, vector_reader
from primus_turbo_plugin.amdgcn.emulator.waits import LOAD, STORE, VM
from primus_turbo_plugin.amdgcn.emulator.waves import Ints
from primus_turbo_plugin.amdgcn.faults import OutOfBoundsError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine


def _addresses(machine: Machine, vector: Operand, scalar: Operand | None, offset: int, width: int) -> tuple[Ints, Ints]:
    """Row (lane of the batch) and byte address within it, [chosen, lane] each; inactive lanes point at byte 0."""
    waves = machine.waves
    address = np.full(waves.active.shape, offset, np.int64)
    if vector.kind is Kind.VECTOR:
        address = address + vector_reader(vector, "u32")(machine)
    if scalar is not None and scalar.kind is not Kind.ABSENT:
        address = address + scalar_reader(scalar, "u32")(machine).astype(np.int64)[:, None]
    address = np.where(waves.active, address, 0)
    if ((address < 0) | (address + width > machine.scratch.shape[1])).any():
        raise OutOfBoundsError(
            f"scratch access of {width} bytes is outside the {machine.scratch.shape[1]} bytes of a lane."
        )
    return waves.indices[:, None] * waves.lanes + np.arange(waves.lanes), address


def _bind_load(instruction: Instruction) -> Execute:
    """D = scratch of this lane."""
    target, vector, *scalar = instruction.operands
    width = parse_width(instruction.opcode.split("_", 2)[2])
    offset = instruction.number("offset")

    def execute(machine: Machine) -> None:
        row, address = _addresses(machine, vector, scalar[0] if scalar else None, offset, width.bytes)
        data = machine.scratch[row[..., None], address[..., None] + np.arange(width.bytes)]
        load_registers(machine, target.index, data, width)
        machine.waits.fill([VM if machine.arch.is_cdna else LOAD], target.registers(), instruction)

    return execute


def _bind_store(instruction: Instruction) -> Execute:
    """scratch of this lane = data."""
    vector, source, *scalar = instruction.operands
    width = parse_width(instruction.opcode.split("_", 2)[2])
    offset = instruction.number("offset")

    def execute(machine: Machine) -> None:
        row, address = _addresses(machine, vector, scalar[0] if scalar else None, offset, width.bytes)
        active = machine.waves.active
        data = store_bytes(machine, source, width)
        machine.scratch[row[active][:, None], address[active][:, None] + np.arange(width.bytes)] = data[active]
        machine.waits.count(VM if machine.arch.is_cdna else STORE)

    return execute


_NAMES = {
    CDNA: (
        "ubyte sbyte ushort sshort dword dwordx2 dwordx3 dwordx4 short_d16 short_d16_hi",
        "byte short dword dwordx2 dwordx3 dwordx4",
    ),
    GFX1250: ("u8 i8 u16 i16 b32 b64 b96 b128 d16_b16 d16_hi_b16", "b8 b16 b32 b64 b96 b128"),
}
for _archs, (_loads, _stores) in _NAMES.items():
    register(
        [f"scratch_load_{name}" for name in _loads.split()], _bind_load, family="scratch", source="CDNA, RDNA4: FLAT",
        meaning="D = private memory", archs=_archs, modifiers=("offset",), loads=True,
    )  # fmt: skip
    register(
        [f"scratch_store_{name}" for name in _stores.split()], _bind_store, family="scratch", source="CDNA, RDNA4: FLAT",
        meaning="private memory = data", archs=_archs, modifiers=("offset",),
    )  # fmt: skip
