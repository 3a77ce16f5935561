"""Packed arithmetic: two 16-bit or two 32-bit values per instruction.

Source: CDNA, RDNA4 "VOP3P". `op_sel` chooses, for the low result, which half (or register) of each source is read;
`op_sel_hi` the same for the high result (default: the upper one); `neg_lo`, `neg_hi` negate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Kind, Operand
from primus_turbo_plugin.amdgcn.emulator.isa.functions import fma16, fma32
from primus_turbo_plugin.amdgcn.emulator.isa.registry import ALL, GFX950, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, Reader, typed, vector_reader, words_of
from primus_turbo_plugin.amdgcn.emulator.waves import U32

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

Function = Callable[..., Array]
_MODIFIERS = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp")


def _negated(read: Reader, negate: int) -> Reader:
    return (lambda m: -read(m)) if negate else read


def _pick_register(operand: Operand, upper: int) -> Operand:
    """One register of a 64-bit source; constants and single registers serve both results."""
    if operand.kind in (Kind.VECTOR, Kind.SCALAR) and operand.count > 1:
        return operand.shifted(upper, 1)
    return operand


def _readers(instruction: Instruction, kind: str) -> tuple[list[Reader], list[Reader]]:
    """Readers of the sources for the low and for the high result."""
    sources = instruction.operands[1:]
    count = len(sources)
    chosen = instruction.vector("op_sel", count), instruction.vector("op_sel_hi", count, default=1)
    signs = instruction.vector("neg_lo", count), instruction.vector("neg_hi", count)
    result: tuple[list[Reader], list[Reader]] = ([], [])
    for select, sign, readers in zip(chosen, signs, result, strict=True):
        for operand, upper, negate in zip(sources, select, sign, strict=False):
            if kind in ("f32", "u32"):
                read = vector_reader(_pick_register(operand, upper), kind)
            elif operand.kind in (Kind.VECTOR, Kind.SCALAR):
                read = vector_reader(operand, kind, bool(upper))
            else:
                read = _constant_half(operand, kind, upper)
            readers.append(_negated(read, negate))
    return result


def _constant_half(operand: Operand, kind: str, upper: int) -> Reader:
    """A half of a constant: inline constants have a value in the low half only, literals in both."""
    low = vector_reader(operand, kind)
    if not upper:
        return low
    word = operand.index & 0xFFFFFFFF if operand.kind is Kind.INTEGER and not -16 <= operand.index <= 64 else 0
    value = typed(np.array([[word >> 16]], U32), kind)
    return lambda m: value


def _bind_wide(function: Function, kind: str) -> Callable[[Instruction], Execute]:
    """Two 32-bit results in two registers."""

    def bind(instruction: Instruction) -> Execute:
        low, high = _readers(instruction, kind)
        target = instruction.operands[0].index

        def execute(machine: Machine) -> None:
            first = words_of(function(*[read(machine) for read in low]), kind).copy()
            second = words_of(function(*[read(machine) for read in high]), kind).copy()
            machine.waves.write_vector(target, first)
            machine.waves.write_vector(target + 1, second)

        return execute

    return bind


def _bind_halves(function: Function, kind: str) -> Callable[[Instruction], Execute]:
    """Two 16-bit results in one register."""

    def bind(instruction: Instruction) -> Execute:
        low, high = _readers(instruction, kind)
        target = instruction.operands[0].index
        clamp = instruction.flag("clamp")

        def one(machine: Machine, readers: list[Reader]) -> Array:
            value = function(*[read(machine) for read in readers])
            return np.clip(value, value.dtype.type(0), value.dtype.type(1)) if clamp else value

        def execute(machine: Machine) -> None:
            first, second = words_of(one(machine, low), kind), words_of(one(machine, high), kind)
            machine.waves.write_vector(target, first | (second << U32(16)))

        return execute

    return bind


def _bind_move(instruction: Instruction) -> Execute:
    """v_pk_mov_b32: low result from source 0, high result from source 1, `op_sel` choosing the register of each."""
    select = instruction.vector("op_sel", 2)
    target, first, second = instruction.operands
    reads = [
        vector_reader(_pick_register(first, select[0]), "u32"),
        vector_reader(_pick_register(second, select[1]), "u32"),
    ]

    def execute(machine: Machine) -> None:
        low, high = (np.array(read(machine)) for read in reads)
        machine.waves.write_vector(target.index, low)
        machine.waves.write_vector(target.index + 1, high)

    return execute


def _packed(name: str, kind: str, function: Function, meaning: str, archs: frozenset[str] = ALL) -> None:
    bind = (_bind_wide if kind in ("f32", "u32") else _bind_halves)(function, kind)
    register(
        name, bind, family="vector packed", source="CDNA, RDNA4: VOP3P", meaning=f"{meaning}, on two values", archs=archs,
        modifiers=_MODIFIERS,
    )  # fmt: skip


_function: Function
_packed("v_pk_add_f32", "f32", lambda a, b: a + b, "D = S0 + S1")
_packed("v_pk_mul_f32", "f32", lambda a, b: a * b, "D = S0 * S1")
_packed("v_pk_fma_f32", "f32", fma32, "D = fma(S0, S1, S2)")
register(
    "v_pk_mov_b32", _bind_move, family="vector packed", source="CDNA: VOP3P", meaning="D = {S1, S0} registers",
    modifiers=("op_sel", "op_sel_hi"),
)  # fmt: skip
for _kind, _fma, _archs in (("f16", fma16, ALL), ("bf16", fma32, GFX1250)):
    _packed(f"v_pk_add_{_kind}", _kind, lambda a, b: a + b, "D = S0 + S1", _archs)
    _packed(f"v_pk_mul_{_kind}", _kind, lambda a, b: a * b, "D = S0 * S1", _archs)
    _packed(f"v_pk_fma_{_kind}", _kind, _fma, "D = fma(S0, S1, S2)", _archs)
    for _name, _function in (("min", np.fmin), ("max", np.fmax)):
        if _kind == "f16":
            _packed(f"v_pk_{_name}_f16", "f16", _function, f"D = {_name}(S0, S1)")
        _packed(f"v_pk_{_name}_num_{_kind}", _kind, _function, f"D = {_name}(S0, S1)", GFX1250)
for _name, _function in (("minimum3", np.minimum), ("maximum3", np.maximum)):
    _packed(
        f"v_pk_{_name}_f16",
        "f16",
        lambda a, b, c, f=_function: f(f(a, b), c),
        f"D = {_name}(S0, S1, S2)",
        GFX950 | GFX1250,
    )
for _kind in ("u16", "i16"):
    for _name, _function in (("min", np.minimum), ("max", np.maximum)):
        _packed(f"v_pk_{_name}_{_kind}", _kind, _function, f"D = {_name}(S0, S1)")
_packed("v_pk_add_u16", "u16", lambda a, b: a + b, "D = S0 + S1")
_packed("v_pk_sub_i16", "i16", lambda a, b: a - b, "D = S0 - S1")
_packed("v_pk_mul_lo_u16", "u16", lambda a, b: a * b, "D = S0 * S1")
_packed("v_pk_mad_u16", "u16", lambda a, b, c: a * b + c, "D = S0 * S1 + S2")
_packed("v_pk_lshlrev_b16", "u16", lambda a, b: b << (a & np.uint16(15)), "D = S1 << S0")
_packed("v_pk_lshrrev_b16", "u16", lambda a, b: b >> (a & np.uint16(15)), "D = S1 >> S0")
_packed("v_pk_ashrrev_i16", "i16", lambda a, b: b >> (a & np.int16(15)), "D = S1 >> S0")


# -- mixed precision ------------------------------------------------------------------------------------------------------
def _bind_mixed(instruction: Instruction) -> Execute:
    """v_fma_mix*: each source is float32, or (where `op_sel_hi` says so) the half of a register `op_sel` chooses."""
    narrow = "bf16" if instruction.opcode.endswith("_bf16") else "f16"
    sources = instruction.operands[1:]
    halves, is_half = instruction.vector("op_sel", 3), instruction.vector("op_sel_hi", 3)
    readers = [
        vector_reader(operand, narrow if half else "f32", bool(upper))
        for operand, half, upper in zip(sources, is_half, halves, strict=True)
    ]
    target = instruction.operands[0].index
    lower, upper = "mixlo" in instruction.opcode, "mixhi" in instruction.opcode
    clamp = instruction.flag("clamp")

    def execute(machine: Machine) -> None:
        value = fma32(*(read(machine).astype(np.float32) for read in readers))
        value = np.clip(value, np.float32(0), np.float32(1)) if clamp else value
        if not lower and not upper:
            machine.waves.write_vector(target, words_of(value, "f32"))
            return
        bits, previous = words_of(value, narrow), machine.waves.vector(target)
        if upper:
            machine.waves.write_vector(target, (previous & U32(0xFFFF)) | (bits << U32(16)))
        else:
            machine.waves.write_vector(target, (previous & U32(0xFFFF0000)) | bits)

    return execute


_MIXED = ("op_sel", "op_sel_hi", "clamp")
register("v_fma_mix_f32 v_fma_mixlo_f16 v_fma_mixhi_f16", _bind_mixed, family="vector packed", source="CDNA, RDNA4: VOP3P",
         meaning="D = fma(S0, S1, S2) in float32, sources float32 or float16", modifiers=_MIXED)  # fmt: skip
register("v_fma_mix_f32_bf16 v_fma_mixlo_bf16 v_fma_mixhi_bf16", _bind_mixed, family="vector packed", source="LLVM: gfx1250",
         meaning="D = fma(S0, S1, S2) in float32, sources float32 or bfloat16", archs=GFX1250, modifiers=_MIXED)  # fmt: skip
