"""Global, flat and buffer loads and stores.

Source: CDNA "Flat memory instructions", "Vector memory (MUBUF)"; RDNA4 of the same names. A buffer access outside
`num_records` of its descriptor loads zero or stores nothing (raw buffers); every access inside it must also fall into a
registered buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Kind, Operand
from primus_turbo_plugin.amdgcn.emulator.isa.access import Bytes, Width, load_registers, parse_width, store_bytes
from primus_turbo_plugin.amdgcn.emulator.isa.registry import CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Reader, scalar_reader, vector_reader
from primus_turbo_plugin.amdgcn.emulator.waits import DS, LGKM, LOAD, STORE, VM
from primus_turbo_plugin.amdgcn.emulator.waves import Bools, Ints
from primus_turbo_plugin.amdgcn.faults import UnknownInstructionError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

Addresses = Callable[["Machine"], tuple[Ints, Bools]]
_OFF = Operand(Kind.ABSENT, text="off")


def global_addresses(instruction: Instruction, address: Operand, base: Operand, width: int) -> Addresses:
    """64-bit addresses [chosen, lane] of a global or flat access, and the lanes that make it."""
    offset = instruction.number("offset")
    if base.kind is Kind.ABSENT:
        read = vector_reader(address, "u64")
        return lambda m: (m.waves.spread(read(m)).astype(np.int64) + offset, m.waves.active)
    read_offset = vector_reader(address, "i32" if instruction.flag("scale_offset") else "u32")
    read_base = scalar_reader(base, "u64")
    scale = width if instruction.flag("scale_offset") else 1

    def compute(machine: Machine) -> tuple[Ints, Bools]:
        lanes = machine.waves.spread(read_offset(machine)).astype(np.int64) * scale
        return lanes + read_base(machine).astype(np.int64)[:, None] + offset, machine.waves.active

    return compute


def _descriptor(machine: Machine, words: list[Reader]) -> tuple[Ints, Ints]:
    """Base address and `num_records` of a buffer descriptor, [chosen] each.

    CDNA: base in bits 47:0, records in 95:64. gfx1250: base in 56:0, records in 101:57 (LLVM, `has45BitNumRecords`).
    """
    word = [read(machine).astype(np.int64) for read in words]
    if machine.arch.is_cdna:
        return word[0] | ((word[1] & 0xFFFF) << 32), word[2]
    return word[0] | ((word[1] & 0x01FFFFFF) << 32), (word[1] >> 25) | (word[2] << 7) | ((word[3] & 0x3F) << 39)


def buffer_addresses(
    instruction: Instruction, address: Operand, descriptor: Operand, soffset: Operand, width: int
) -> Addresses:
    """Addresses of a raw buffer access and the lanes inside `num_records`."""
    if instruction.flag("idxen"):
        raise UnknownInstructionError(f"{instruction.where}: indexed (structured) buffers are not emulated.")
    offset = instruction.number("offset")
    read_address = vector_reader(address, "u32") if instruction.flag("offen") else None
    read_soffset = scalar_reader(soffset, "u32")
    words = [scalar_reader(descriptor.shifted(i, 1), "u32") for i in range(4)]

    def compute(machine: Machine) -> tuple[Ints, Bools]:
        waves = machine.waves
        base, records = _descriptor(machine, words)
        lanes = np.zeros(waves.active.shape, np.int64) + offset
        if read_address is not None:
            lanes = lanes + read_address(machine)
        lanes = lanes + np.broadcast_to(read_soffset(machine).astype(np.int64), waves.count)[:, None]
        return base[:, None] + lanes, waves.active & (lanes + width <= records[:, None])

    return compute


def addresses_of(instruction: Instruction, operands: tuple[Operand, ...], width: int) -> Addresses:
    """Address computation for the operands after the data: buffer, global or flat form."""
    if instruction.opcode.startswith("buffer_"):
        return buffer_addresses(instruction, operands[0], operands[1], operands[2], width)
    base = operands[1] if len(operands) > 1 else _OFF
    return global_addresses(instruction, operands[0], base, width)


def read_lanes(machine: Machine, addresses: Ints, lanes: Bools, width: int) -> Bytes:
    """Load [chosen, lane, width]; lanes switched off read as zero."""
    if lanes.all():
        return machine.memory.read(addresses, width)
    data = np.zeros((*lanes.shape, width), np.uint8)
    data[lanes] = machine.memory.read(addresses[lanes], width)
    return data


def _counters(machine: Machine, instruction: Instruction, store: bool) -> list[str]:
    flat = instruction.opcode.startswith("flat_")
    if machine.arch.is_cdna:
        return [VM, LGKM] if flat else [VM]
    if store:
        return [STORE, DS] if flat else [STORE]
    return [LOAD, DS] if flat else [LOAD]


def _bind_load(instruction: Instruction) -> Execute:
    """D = memory."""
    target = instruction.operands[0]
    width = parse_width(instruction.opcode.split("_", 2)[2])
    compute = addresses_of(instruction, instruction.operands[1:], width.bytes)

    def execute(machine: Machine) -> None:
        addresses, lanes = compute(machine)
        load_registers(machine, target.index, read_lanes(machine, addresses, lanes, width.bytes), width)
        machine.waits.fill(_counters(machine, instruction, False), target.registers(), instruction)

    return execute


def _bind_store(instruction: Instruction) -> Execute:
    """memory = data."""
    buffer = instruction.opcode.startswith("buffer_")
    operands = instruction.operands
    source = operands[0] if buffer else operands[1]
    width: Width = parse_width(instruction.opcode.split("_", 2)[2])
    remaining = operands[1:] if buffer else (operands[0], *operands[2:])
    compute = addresses_of(instruction, remaining, width.bytes)

    def execute(machine: Machine) -> None:
        addresses, lanes = compute(machine)
        machine.memory.write(addresses[lanes], store_bytes(machine, source, width)[lanes])
        for counter in _counters(machine, instruction, True):
            machine.waits.count(counter)

    return execute


_MODIFIERS = ("offset", "offen", "idxen", "scale_offset")
_LOADS_9 = ("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx2", "dwordx3", "dwordx4", "ubyte_d16", "ubyte_d16_hi",
            "sbyte_d16", "sbyte_d16_hi", "short_d16", "short_d16_hi")  # fmt: skip
_STORES_9 = ("byte", "short", "dword", "dwordx2", "dwordx3", "dwordx4", "byte_d16_hi", "short_d16_hi")
_LOADS_12 = ("u8", "i8", "u16", "i16", "b32", "b64", "b96", "b128", "d16_u8", "d16_hi_u8", "d16_i8", "d16_hi_i8", "d16_b16",
             "d16_hi_b16")  # fmt: skip
_STORES_12 = ("b8", "b16", "b32", "b64", "b96", "b128", "d16_hi_b8", "d16_hi_b16")
for _space in ("global", "flat", "buffer"):
    for _archs, _loads, _stores in ((CDNA, _LOADS_9, _STORES_9), (GFX1250, _LOADS_12, _STORES_12)):
        if _space != "buffer":  # a `buffer_load ... lds` goes to LDS instead: `to_lds` registers those
            register(
                [f"{_space}_load_{name}" for name in _loads], _bind_load, family="vector memory",
                source="CDNA, RDNA4: FLAT", meaning="D = memory", archs=_archs, modifiers=_MODIFIERS, loads=True,
            )  # fmt: skip
        register(
            [f"{_space}_store_{name}" for name in _stores], _bind_store, family="vector memory",
            source="CDNA, RDNA4: FLAT, MUBUF", meaning="memory = data", archs=_archs, modifiers=_MODIFIERS,
        )  # fmt: skip
BUFFER_LOADS = {
    CDNA: [f"buffer_load_{name}" for name in _LOADS_9],
    GFX1250: [f"buffer_load_{name}" for name in _LOADS_12],
}
bind_load = _bind_load


def _bind_prefetch(instruction: Instruction) -> Execute:
    return lambda machine: None


register("global_prefetch_b8 flat_prefetch_b8", _bind_prefetch, family="vector memory", source="LLVM: gfx1250",
         meaning="cache prefetch: no effect here", archs=GFX1250, modifiers=_MODIFIERS)  # fmt: skip
