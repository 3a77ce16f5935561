"""LDS loads and stores.

Source: CDNA "LDS" (`ds_read*`, `ds_write*`); RDNA4 "LDS" (`ds_load*`, `ds_store*`). The two-address forms take offsets in
units of the element, or of 64 elements with `st64`/`stride64`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa.access import (
    Width,
    address_of,
    load_registers,
    parse_width,
    store_bytes,
)
from primus_turbo_plugin.amdgcn.emulator.isa.registry import CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.waits import DS, LGKM

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

_PAIR = re.compile(r"ds_(?:read2|write2|load_2addr|store_2addr)(st64|_stride64)?_b(\d+)$")


def lds_counter(machine: Machine) -> str:
    """The wait counter LDS operations use."""
    return LGKM if machine.arch.is_cdna else DS


def _bind_load(instruction: Instruction) -> Execute:
    """D = LDS[address + offset]."""
    target, address = instruction.operands
    width = parse_width(instruction.opcode.split("_", 2)[2])
    offset = instruction.number("offset")

    def execute(machine: Machine) -> None:
        data = machine.lds.read(machine.pc, address_of(machine, address, offset), width.bytes)
        load_registers(machine, target.index, data, width)
        machine.waits.fill([lds_counter(machine)], target.registers(), instruction)

    return execute


def _bind_store(instruction: Instruction) -> Execute:
    """LDS[address + offset] = data."""
    address, source = instruction.operands
    width = parse_width(instruction.opcode.split("_", 2)[2])
    offset = instruction.number("offset")

    def execute(machine: Machine) -> None:
        machine.lds.write(machine.pc, address_of(machine, address, offset), store_bytes(machine, source, width))
        machine.waits.count(lds_counter(machine))

    return execute


def _pair_offsets(instruction: Instruction) -> tuple[Width, int, int]:
    match = _PAIR.match(instruction.opcode)
    assert match is not None, instruction.where
    width = Width(int(match[2]) // 8)
    unit = width.bytes * (64 if match[1] else 1)
    return width, instruction.number("offset0") * unit, instruction.number("offset1") * unit


def _bind_load_pair(instruction: Instruction) -> Execute:
    """D = {LDS[address + offset1], LDS[address + offset0]}."""
    target, address = instruction.operands
    width, first, second = _pair_offsets(instruction)

    def execute(machine: Machine) -> None:
        base = address_of(machine, address, 0)
        data = [machine.lds.read(machine.pc, base + offset, width.bytes) for offset in (first, second)]
        load_registers(machine, target.index, np.concatenate(data, axis=-1), Width(2 * width.bytes))
        machine.waits.fill([lds_counter(machine)], target.registers(), instruction)

    return execute


def _bind_store_pair(instruction: Instruction) -> Execute:
    """LDS[address + offset0] = data0; LDS[address + offset1] = data1."""
    address, source0, source1 = instruction.operands
    width, first, second = _pair_offsets(instruction)

    def execute(machine: Machine) -> None:
        base = address_of(machine, address, 0)
        for offset, source in ((first, source0), (second, source1)):
            machine.lds.write(machine.pc, base + offset, store_bytes(machine, source, width))
        machine.waits.count(lds_counter(machine))

    return execute


_WIDE = ("b32", "b64", "b96", "b128")
_NARROW = ("u8", "i8", "u16", "i16")
_HALVES = ("u8_d16", "u8_d16_hi", "i8_d16", "i8_d16_hi", "u16_d16", "u16_d16_hi")
_STORES = ("b8", "b16", "b8_d16_hi", "b16_d16_hi", *_WIDE)


def _register(archs: frozenset[str], source: str, read: str, write: str, pairs: tuple[str, str, str]) -> None:
    """Register one generation's names; `pairs` are the two-address load, store and the stride suffix."""
    load_pair, store_pair, stride = pairs
    shared: dict[str, Any] = {"family": "lds", "source": source, "archs": archs}
    one, two = ("offset",), ("offset0", "offset1")
    loads = [f"ds_{read}_{width}" for width in (*_WIDE, *_NARROW, *_HALVES)]
    register(loads, _bind_load, meaning="D = LDS[address + offset]", modifiers=one, loads=True, **shared)
    stores = [f"ds_{write}_{width}" for width in _STORES]
    register(stores, _bind_store, meaning="LDS[address + offset] = data", modifiers=one, **shared)
    loads = [f"ds_{load_pair}{tail}_{bits}" for tail in ("", stride) for bits in ("b32", "b64")]
    register(loads, _bind_load_pair, meaning="D = two LDS elements", modifiers=two, loads=True, **shared)
    stores = [f"ds_{store_pair}{tail}_{bits}" for tail in ("", stride) for bits in ("b32", "b64")]
    register(stores, _bind_store_pair, meaning="two LDS elements = data", modifiers=two, **shared)


_register(CDNA, "CDNA: LDS", "read", "write", ("read2", "write2", "st64"))
_register(GFX1250, "RDNA4: LDS", "load", "store", ("load_2addr", "store_2addr", "_stride64"))
