"""Global and buffer atomics.

Source: CDNA, RDNA4 "FLAT", "MUBUF" atomics. The old value is returned where the instruction asks for it (`sc0` on CDNA,
`th:TH_ATOMIC_RETURN` on gfx1250).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Operand
from primus_turbo_plugin.amdgcn.emulator.isa.atomic_functions import ATOMICS, apply_in_order
from primus_turbo_plugin.amdgcn.emulator.isa.global_access import addresses_of
from primus_turbo_plugin.amdgcn.emulator.isa.registry import CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, vector_reader
from primus_turbo_plugin.amdgcn.emulator.waits import LOAD, STORE, VM
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Bools

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

# Opcode tail on CDNA and on gfx1250, for each function.
_CDNA_NAMES = {
    "add": "add_u32", "sub": "sub_u32", "smin": "min_i32", "smax": "max_i32", "umin": "min_u32", "umax": "max_u32",
    "and": "and_b32", "or": "or_b32", "xor": "xor_b32", "swap": "swap_b32", "add_f32": "add_f32", "add_x2": "add_u64",
    "pk_add_bf16": "pk_add_bf16", "pk_add_f16": "pk_add_f16", "add_f64": "add_f64",
}  # fmt: skip
_GFX1250_NAMES = {
    **{name: name for name in ATOMICS if not name.startswith(("min_f", "max_f"))},
    "min_num_f32": "min_f32", "max_num_f32": "max_f32",
}  # fmt: skip


def returns_old(instruction: Instruction) -> bool:
    """Whether an atomic returns the value it found."""
    return instruction.flag("sc0") or instruction.flag("glc") or "RETURN" in instruction.word("th")


def _split(instruction: Instruction) -> tuple[Operand | None, Operand, tuple[Operand, ...]]:
    """Target (if the old value is returned), data, and the address operands."""
    operands = instruction.operands
    returns = returns_old(instruction)
    if instruction.opcode.startswith("buffer_"):
        return (operands[0] if returns else None), operands[0], operands[1:]
    if returns:
        return operands[0], operands[2], (operands[1], *operands[3:])
    return None, operands[1], (operands[0], *operands[2:])


def _words(machine: Machine, operand: Operand, size: int) -> Array:
    return machine.waves.spread(vector_reader(operand, "u64" if size == 8 else "u32")(machine))


def _return_old(machine: Machine, instruction: Instruction, target: Operand, old: Array, lanes: Bools) -> None:
    """Put the values the lanes found into the target."""
    result = np.zeros(machine.waves.active.shape, old.dtype)
    result[lanes] = old
    registers = old.dtype.itemsize // 4
    for i in range(registers):
        machine.waves.write_vector(target.index + i, (result >> result.dtype.type(32 * i)).astype(U32))
    counter = VM if machine.arch.is_cdna else LOAD
    machine.waits.fill([counter], target.shifted(0, registers).registers(), instruction)


def _bind_atomic(instruction: Instruction) -> Execute:
    """memory = f(memory, data), lane after lane."""
    tail = instruction.opcode.split("_atomic_")[1]
    function = ATOMICS[(_CDNA_NAMES | _GFX1250_NAMES)[tail]]
    size = np.dtype(function.dtype).itemsize
    target, source, remaining = _split(instruction)
    compute = addresses_of(instruction, remaining, size)

    def execute(machine: Machine) -> None:
        addresses, lanes = compute(machine)
        offsets = machine.memory.offsets(addresses[lanes], size, "atomic")
        old = apply_in_order(machine.memory.storage, offsets, _words(machine, source, size)[lanes], function)
        if target is None:
            machine.waits.count(VM if machine.arch.is_cdna else STORE)
            return
        _return_old(machine, instruction, target, old, lanes)

    return execute


def _bind_compare_swap(instruction: Instruction) -> Execute:
    """memory = data[0] where memory == data[1] (one element after the other)."""
    size = 8 if instruction.opcode.endswith(("_x2", "_b64")) else 4
    target, source, remaining = _split(instruction)
    compute = addresses_of(instruction, remaining, size)

    def execute(machine: Machine) -> None:
        addresses, lanes = compute(machine)
        offsets = machine.memory.offsets(addresses[lanes], size, "atomic")
        new, expected = (_words(machine, source.shifted(i * size // 4, size // 4), size)[lanes] for i in (0, 1))
        view = machine.memory.storage.view(new.dtype)
        old = np.empty(len(offsets), new.dtype)
        for i, index in enumerate(offsets // size):
            old[i] = view[index]
            if old[i] == expected[i]:
                view[index] = new[i]
        if target is None:
            machine.waits.count(VM if machine.arch.is_cdna else STORE)
            return
        _return_old(machine, instruction, target, old, lanes)

    return execute


_MODIFIERS = ("offset", "offen", "scale_offset")
_SOURCE = "CDNA, RDNA4: FLAT, MUBUF"
for _archs, _names, _swap in (
    (CDNA, _CDNA_NAMES, ("cmpswap", "cmpswap_x2")),
    (GFX1250, _GFX1250_NAMES, ("cmpswap_b32", "cmpswap_b64")),
):
    for _space in ("global", "flat", "buffer"):
        register(
            [f"{_space}_atomic_{name}" for name in _names], _bind_atomic, family="global atomic", source=_SOURCE,
            meaning="memory = f(memory, data); D = old value if asked for", archs=_archs, modifiers=_MODIFIERS,
        )  # fmt: skip
        register(
            [f"{_space}_atomic_{name}" for name in _swap], _bind_compare_swap, family="global atomic", source=_SOURCE,
            meaning="memory = data0 where memory == data1; D = old value if asked for", archs=_archs, modifiers=_MODIFIERS,
        )  # fmt: skip
