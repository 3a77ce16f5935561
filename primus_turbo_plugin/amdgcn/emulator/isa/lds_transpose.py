"""LDS transpose loads: each lane reads a piece of a row and receives a piece of a column.

Source: CDNA4 "LDS" (`ds_read_b64_tr_b16/b8/b4`), LLVM `int_amdgcn_ds_read_tr*`/`ds_load_tr*`, and the address patterns of
Triton's AMD backend, which the tests run against. On gfx950 a group of 16 lanes reads a matrix whose rows are 16 elements
long; lane i of the group receives column i. On gfx1250 16-bit elements are transposed in 8x8 blocks of 8 lanes; the 8-bit
map follows Triton's addresses, and the 4-bit one is the map that pattern allows that agrees with the register order of
the matrix instructions (it is not pinned by any public document: treat it as likely, not certain).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa.access import Bytes, Width, address_of, load_registers
from primus_turbo_plugin.amdgcn.emulator.isa.formats import unpack
from primus_turbo_plugin.amdgcn.emulator.isa.lds_access import lds_counter
from primus_turbo_plugin.amdgcn.emulator.isa.registry import GFX950, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array
from primus_turbo_plugin.amdgcn.faults import EmulationError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine


def _columns_of_16(elements: Array) -> Array:
    """gfx950: [wave, 64, E] -> per group of 16 lanes, an E x 16 matrix in lane order; lane i gets column i."""
    waves, lanes, count = elements.shape
    matrix = elements.reshape(waves, lanes // 16, count, 16)
    return matrix.transpose(0, 1, 3, 2).reshape(waves, lanes, count)


def _blocks_of_8(elements: Array) -> Array:
    """gfx1250, 16-bit: 8x8 transpose within each 8 lanes."""
    waves, lanes, count = elements.shape
    return elements.reshape(waves, lanes // 8, 8, count).transpose(0, 1, 3, 2).reshape(waves, lanes, count)


def _gathered(source_lane: Array, source_element: Array) -> Callable[[Array], Array]:
    return lambda elements: elements[:, source_lane, source_element]


_LANE = np.arange(32)[:, None]
_E8, _E16 = np.arange(8)[None, :], np.arange(16)[None, :]
_MAP_8_BIT = _gathered(
    (_E8 & 3) | ((_E8 & 4) << 1) | ((_LANE & 8) >> 1) | (_LANE & 16), np.broadcast_to(_LANE & 7, (32, 8))
)
_MAP_4_BIT = _gathered(
    np.broadcast_to((_E16 & 7) | ((_E16 & 8) << 1) | ((_LANE & 16) >> 1), (32, 16)),
    np.broadcast_to(_LANE & 15, (32, 16)),
)


def _split(data: Bytes, bits: int) -> Array:
    return np.ascontiguousarray(data).view(np.uint16) if bits == 16 else unpack(data, bits)


def _join(elements: Array, bits: int) -> Bytes:
    if bits == 4:
        return np.ascontiguousarray(elements[..., 0::2] | (elements[..., 1::2] << 4)).astype(np.uint8)
    return np.ascontiguousarray(elements).view(np.uint8)


def _bind(bits: int, size: int, transpose: Callable[[Array], Array]) -> Callable[[Instruction], Execute]:
    """A transpose load of `size` bytes per lane and `bits` per element."""

    def bind(instruction: Instruction) -> Execute:
        target, address = instruction.operands
        offset = instruction.number("offset")

        def execute(machine: Machine) -> None:
            addresses = address_of(machine, address, offset)
            if (addresses & (size - 1))[machine.waves.active].any():
                raise EmulationError(f"{instruction.where}: transpose loads need addresses aligned to {size} bytes.")
            data = machine.lds.read(machine.pc, addresses, size)
            result = _join(transpose(_split(data, bits)), bits)
            load_registers(machine, target.index, result, Width(size))
            machine.waits.fill([lds_counter(machine)], target.registers(), instruction)

        return execute

    return bind


for _name, _bits, _size in (("b64_tr_b16", 16, 8), ("b64_tr_b8", 8, 8), ("b64_tr_b4", 4, 8)):
    register(f"ds_read_{_name}", _bind(_bits, _size, _columns_of_16), family="lds transpose", source="CDNA4: LDS; Triton",
             meaning="D = a column of a 16-wide matrix in LDS", archs=GFX950, modifiers=("offset",), loads=True)  # fmt: skip
for _name, _bits, _size, _map in (
    ("tr16_b128", 16, 16, _blocks_of_8), ("tr8_b64", 8, 8, _MAP_8_BIT), ("tr4_b64", 4, 8, _MAP_4_BIT),
):  # fmt: skip
    register(f"ds_load_{_name}", _bind(_bits, _size, _map), family="lds transpose", source="LLVM, Triton: gfx1250",
             meaning="D = a column piece of a matrix in LDS", archs=GFX1250, modifiers=("offset",), loads=True)  # fmt: skip
