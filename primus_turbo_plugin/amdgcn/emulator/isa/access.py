"""Shared parts of memory instructions: data widths, and bytes to registers and back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Operand
from primus_turbo_plugin.amdgcn.emulator.isa.values import vector_reader
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Ints
from primus_turbo_plugin.amdgcn.faults import AssemblyError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

Bytes = NDArray[np.uint8]

_NAMED = {"byte": ("u", 1), "ubyte": ("u", 1), "sbyte": ("i", 1), "short": ("u", 2), "ushort": ("u", 2),
          "sshort": ("i", 2), "dword": ("b", 4), "dwordx2": ("b", 8), "dwordx3": ("b", 12), "dwordx4": ("b", 16)}  # fmt: skip
_SIZED = re.compile(r"([bui])(8|16|32|64|96|128)$")


@dataclass(frozen=True, slots=True)
class Width:
    """What one lane moves.

    Attributes:
        bytes: Bytes in memory.
        signed: Sign-extended on load.
        half: `"l"` or `"h"`: a 16-bit half of the register is loaded or stored and the other kept (`d16`, `d16_hi`).
    """

    bytes: int
    signed: bool = False
    half: str = ""

    @property
    def registers(self) -> int:
        return max(self.bytes // 4, 1)


def parse_width(suffix: str) -> Width:
    """Width from the tail of an opcode: `dwordx4`, `b128`, `u8`, `short_d16_hi`, `d16_hi_b8`, ..."""
    half = ""
    if "d16" in suffix:
        half = "h" if "hi" in suffix else "l"
        suffix = re.sub(r"_?d16(_hi)?_?", "", suffix)
    if suffix in _NAMED:
        kind, size = _NAMED[suffix]
        return Width(size, kind == "i", half)
    match = _SIZED.match(suffix)
    if match is None:
        raise AssemblyError(f"unknown memory width {suffix!r}.")
    return Width(int(match[2]) // 8, match[1] == "i", half)


def load_registers(machine: Machine, target: int, data: Bytes, width: Width) -> None:
    """Put loaded bytes [chosen, lane, width] into registers."""
    waves = machine.waves
    if width.bytes >= 4:
        words = np.ascontiguousarray(data).view(U32)
        for i in range(words.shape[-1]):
            waves.write_vector(target + i, words[..., i])
        return
    dtype = np.dtype(f"{'i' if width.signed else 'u'}{width.bytes}")
    value = np.ascontiguousarray(data).view(dtype)[..., 0].astype(np.int32).view(U32)
    if width.half:
        previous = waves.vector(target)
        if width.half == "h":
            value = (previous & U32(0xFFFF)) | (value << U32(16))
        else:
            value = (previous & U32(0xFFFF0000)) | (value & U32(0xFFFF))
    waves.write_vector(target, value)


def store_bytes(machine: Machine, source: Operand, width: Width) -> Bytes:
    """Bytes to store, [chosen, lane, width]."""
    waves = machine.waves
    words = [waves.spread(vector_reader(source.shifted(i, 1), "u32")(machine)) for i in range(width.registers)]
    data = np.ascontiguousarray(np.stack(words, axis=-1)).view(np.uint8)
    if width.half == "h":
        return data[..., 2 : 2 + width.bytes]
    return data[..., : width.bytes]


def address_of(machine: Machine, operand: Operand, offset: int) -> Ints:
    """32-bit LDS address [chosen, lane]."""
    return machine.waves.spread(vector_reader(operand, "u32")(machine)).astype(np.int64) + offset


def narrowest_store(instructions: tuple[Instruction, ...]) -> int:
    """Bytes of the narrowest LDS store of a kernel, at most 4: what races are tracked by."""
    narrowest = 4
    for instruction in instructions:
        if instruction.opcode.startswith(("ds_write_b", "ds_store_b")):
            narrowest = min(narrowest, parse_width(instruction.opcode.split("_", 2)[2]).bytes)
    return narrowest
