"""Scalar loads: kernel arguments and constants.

Source: CDNA "SMEM"; RDNA4 "SMEM". They return out of order, so only a wait for zero covers them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Kind
from primus_turbo_plugin.amdgcn.emulator.isa.registry import CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import scalar_reader
from primus_turbo_plugin.amdgcn.emulator.waits import KM, LGKM
from primus_turbo_plugin.amdgcn.emulator.waves import U32

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

_DWORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4, "dwordx8": 8, "dwordx16": 16}
_BITS = {"b32": 1, "b64": 2, "b96": 3, "b128": 4, "b256": 8, "b512": 16}
_NARROW = {"u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16}


def _bind_load(instruction: Instruction) -> Execute:
    """D = memory at base + offset (immediate or register)."""
    target, base, offset = instruction.operands
    kind = instruction.opcode.rsplit("_", 1)[1]
    read_base, read_offset = scalar_reader(base, "u64"), scalar_reader(offset, "u32")
    immediate = offset.index if offset.kind is Kind.INTEGER else None
    extra = instruction.number("offset")
    size = np.dtype(_NARROW[kind]).itemsize if kind in _NARROW else 4 * (_DWORDS.get(kind) or _BITS[kind])
    scale = size if instruction.flag("scale_offset") else 1

    def execute(machine: Machine) -> None:
        waves = machine.waves
        shift = immediate if immediate is not None else read_offset(machine).astype(np.int64) * scale
        address = np.broadcast_to(read_base(machine).astype(np.int64) + shift + extra, waves.count)
        if kind in _NARROW:
            dtype = np.dtype(_NARROW[kind])
            value = machine.memory.read(address, size).view(dtype)[:, 0].astype(np.int64)
            waves.write_scalar(target.index, (value & 0xFFFFFFFF).astype(U32))
        else:
            words = np.ascontiguousarray(machine.memory.read(address, size)).view(U32)
            for i in range(size // 4):
                waves.write_scalar(target.index + i, words[:, i])
        counter = LGKM if machine.arch.is_cdna else KM
        machine.waits.fill([counter], target.registers(), instruction, in_order=False)

    return execute


register(
    [f"s_load_{name}" for name in _DWORDS], _bind_load, family="scalar memory", source="CDNA: SMEM",
    meaning="D = memory[base + offset]", archs=CDNA, modifiers=("offset",), loads=True,
)  # fmt: skip
register(
    [f"s_load_{name}" for name in (*_BITS, *_NARROW)], _bind_load, family="scalar memory", source="RDNA4: SMEM",
    meaning="D = memory[base + offset]", archs=GFX1250, modifiers=("offset", "scale_offset"), loads=True,
)  # fmt: skip
