"""LDS atomics and gfx1250's LDS barrier objects.

Source: CDNA, RDNA4 "LDS"; the barrier object's layout (pending count and phase in the low dword, initial count in the high
one, both stored minus one) from LLVM `int_amdgcn_ds_atomic_barrier_arrive*` and Triton's mbarrier lowering.

Atomics are left out of race tracking: they order themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa.access import address_of
from primus_turbo_plugin.amdgcn.emulator.isa.atomic_functions import ATOMICS, apply_in_order
from primus_turbo_plugin.amdgcn.emulator.isa.lds_access import lds_counter
from primus_turbo_plugin.amdgcn.emulator.isa.registry import GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import vector_reader
from primus_turbo_plugin.amdgcn.emulator.waves import U32

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

_LDS_NAMES = {
    "add_u32": "add_u32", "sub_u32": "sub_u32", "min_i32": "min_i32", "max_i32": "max_i32", "min_u32": "min_u32",
    "max_u32": "max_u32", "and_b32": "and_b32", "or_b32": "or_b32", "xor_b32": "xor_b32", "add_f32": "add_f32",
}  # fmt: skip


def _bind_atomic(instruction: Instruction) -> Execute:
    """LDS[address] = f(LDS[address], data); `rtn` forms return the old value."""
    name = instruction.opcode.removeprefix("ds_").replace("_rtn", "")
    returns = "_rtn" in instruction.opcode
    operands = instruction.operands
    target = operands[0] if returns else None
    address, source = operands[-2], operands[-1]
    function = ATOMICS[_LDS_NAMES[name]]
    offset = instruction.number("offset")
    read = vector_reader(source, "u32")

    def execute(machine: Machine) -> None:
        waves = machine.waves
        addresses = address_of(machine, address, offset)
        where = (addresses + machine.lds.base(waves.indices)[:, None])[waves.active]
        machine.lds.check_flat(addresses[waves.active], 4, "atomic")
        values = waves.spread(read(machine))[waves.active]
        old = apply_in_order(machine.lds.storage, where, values, function)
        if target is not None:
            result = np.zeros(waves.active.shape, U32)
            result[waves.active] = old
            waves.write_vector(target.index, result)
            machine.waits.fill([lds_counter(machine)], target.registers(), instruction)
        else:
            machine.waits.count(lds_counter(machine))

    return execute


_PENDING = 0x1FFFFFFF


def arrive(machine: Machine, wave: int, address: int, count: int) -> int:
    """Arrive `count` times at a barrier object in a wave's LDS; returns its state before.

    When the pending count runs out the phase (top 3 bits of the low dword) steps and the count starts over.
    """
    words = machine.lds.group_bytes(wave)[address : address + 8].view(U32)
    low, high = int(words[0]), int(words[1])
    pending, phase = low & _PENDING, low >> 29
    if pending < count:
        pending, phase = high & _PENDING, (phase - 1) & 7
    else:
        pending -= count
    words[0] = pending | (phase << 29)
    return low | (high << 32)


def _bind_arrive(instruction: Instruction) -> Execute:
    """Every active lane arrives at the barrier object at its address."""
    returns = "_rtn_" in instruction.opcode
    address = instruction.operands[1 if returns else 0]
    read_count = vector_reader(instruction.operands[2], "u32") if returns else None
    offset = instruction.number("offset")

    def execute(machine: Machine) -> None:
        waves = machine.waves
        addresses = address_of(machine, address, offset)
        machine.lds.check_flat(addresses[waves.active], 8, "barrier arrival")
        counts = waves.spread(read_count(machine)) if read_count is not None else np.ones(waves.active.shape, U32)
        old = np.zeros(waves.active.shape, np.uint64)
        for row, lane in zip(*np.nonzero(waves.active), strict=True):
            old[row, lane] = arrive(machine, int(waves.indices[row]), int(addresses[row, lane]), int(counts[row, lane]))
        if returns:
            target = instruction.operands[0]
            waves.write_vector(target.index, (old & np.uint64(0xFFFFFFFF)).astype(U32))
            waves.write_vector(target.index + 1, (old >> np.uint64(32)).astype(U32))
            machine.waits.fill([lds_counter(machine)], target.registers(), instruction)
        else:
            machine.waits.count(lds_counter(machine))

    return execute


for _name in _LDS_NAMES:
    _head, _tail = _name.rsplit("_", 1)
    register([f"ds_{_name}"], _bind_atomic, family="lds atomic", source="CDNA, RDNA4: LDS",
             meaning=f"LDS[address] = {_head}(LDS[address], data)", modifiers=("offset",))  # fmt: skip
    register([f"ds_{_head}_rtn_{_tail}"], _bind_atomic, family="lds atomic", source="CDNA, RDNA4: LDS",
             meaning=f"D = LDS[address]; LDS[address] = {_head}(..)", modifiers=("offset",), loads=True)  # fmt: skip
register("ds_atomic_barrier_arrive_rtn_b64", _bind_arrive, family="lds barrier", source="LLVM, Triton: gfx1250",
         meaning="arrive at a barrier object, D = its old state", archs=GFX1250, modifiers=("offset",), loads=True)  # fmt: skip
register("ds_atomic_async_barrier_arrive_b64", _bind_arrive, family="lds barrier", source="LLVM, Triton: gfx1250",
         meaning="arrive at a barrier object", archs=GFX1250, modifiers=("offset",))  # fmt: skip
