"""Dual issue (VOPD, gfx1250): two vector instructions in one, both reading their sources before either writes.

Source: RDNA4 "Dual Issue VALU"; LLVM `VOPDInstructions.td`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa import vector_bits, vector_float, vector_integer  # noqa: F401  (tables first)
from primus_turbo_plugin.amdgcn.emulator.isa.alu import VectorOperation
from primus_turbo_plugin.amdgcn.emulator.isa.registry import GFX1250, Execute, bind, lookup, register

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

# The halves that exist; each has the meaning of the single instruction of that name.
_HALVES = (
    "mov_b32", "cndmask_b32", "add_nc_u32", "sub_nc_u32", "max_i32", "min_i32", "lshlrev_b32", "lshrrev_b32", "ashrrev_i32",
    "and_b32", "bitop2_b32", "add_f32", "sub_f32", "subrev_f32", "mul_f32", "mul_dx9_zero_f32", "fma_f32", "fmac_f32",
    "fmaak_f32", "fmamk_f32", "max_num_f32", "min_num_f32", "add_f64", "mul_f64", "fma_f64", "max_num_f64", "min_num_f64",
)  # fmt: skip


def _bind_half(instruction: Instruction) -> VectorOperation:
    single = Instruction(**{name: getattr(instruction, name) for name in Instruction.__slots__})
    single.opcode = instruction.opcode.replace("v_dual_", "v_")
    operation = bind(single, "gfx1250")
    assert isinstance(operation, VectorOperation)
    return operation


def _bind(instruction: Instruction) -> Execute:
    first = _bind_half(instruction)
    if instruction.dual is None:
        return first
    second = _bind_half(instruction.dual)

    def both(machine: Machine) -> None:
        one = [np.array(value) for value in first.compute(machine)]  # a move returns a view of its source
        two = [np.array(value) for value in second.compute(machine)]
        first.write(machine, one)
        second.write(machine, two)

    return both


for _name in _HALVES:
    _single = lookup(f"v_{_name}", "gfx1250")
    assert _single is not None, f"v_{_name} must be registered before its dual form"
    register(
        f"v_dual_{_name}", _bind, family="vector dual issue", source="RDNA4: VOPD; LLVM", meaning=_single.meaning,
        archs=GFX1250, modifiers=("bitop3",),
    )  # fmt: skip
