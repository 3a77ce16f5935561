"""Typed operand access: turning operands into arrays and results into registers.

Types, as used in the instruction tables:
    u32 i32 f32          one register
    x32                  one register whose sign modifiers act on bit 31 (v_cndmask)
    u16 i16 f16 bf16     half a register, chosen by `.l`/`.h` or `op_sel`
    u64 i64 f64          two registers
    k16                  the sign-extended 16-bit immediate of a SOPK instruction
    mask                 a lane mask in scalar registers

Vector values are [chosen, lane], or broadcastable to it; scalar values are [chosen]. bf16 is carried as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import SCC, Kind, Operand, float_bits
from primus_turbo_plugin.amdgcn.emulator.waves import U32, U64, Words
from primus_turbo_plugin.amdgcn.faults import AssemblyError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

Array = NDArray[Any]
Reader = Callable[["Machine"], Array]
F32 = np.float32

_WIDE = {"u64": U64, "i64": np.int64, "f64": np.float64}
_HALF: dict[str, Any] = {"u16": np.uint16, "i16": np.int16, "f16": np.float16, "bf16": None}
_FLOATS = ("f32", "f64", "f16", "bf16", "x32")


def bf16_to_f32(bits: Array) -> NDArray[np.float32]:
    """Widen bfloat16 bit patterns (low 16 bits of each element)."""
    return (bits.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(value: NDArray[np.float32]) -> Words:
    """Round float32 to bfloat16, ties to even; NaN stays NaN. The result is in the low 16 bits."""
    bits = np.ascontiguousarray(value, dtype=F32).view(U32)
    rounded = (bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16)
    return np.where(np.isnan(value), (bits >> U32(16)) | U32(0x40), rounded).astype(U32)


def constant_bits(operand: Operand, kind: str) -> int:
    """Bit pattern an inline or literal constant has when an operand of this type reads it."""
    if operand.kind is Kind.ABSENT:
        return 0
    if operand.kind is Kind.INTEGER:
        if kind in _WIDE:
            if kind == "f64" and not -16 <= operand.index <= 64 and operand.index < 1 << 32:
                return (operand.index & 0xFFFFFFFF) << 32  # a 32-bit literal is the high half of a double
            return operand.index & 0xFFFFFFFFFFFFFFFF
        return operand.index & 0xFFFFFFFF
    if operand.kind is Kind.FLOAT:
        if kind == "f64":
            return int(np.float64(operand.value).view(U64))
        if kind == "f16":
            return int(np.float16(operand.value).view(np.uint16))
        if kind == "bf16":
            return float_bits(operand.value) >> 16
        return float_bits(operand.value)
    raise AssemblyError(f"operand {operand.text!r} is not a value.")


def typed(words: Array, kind: str) -> Array:
    """View register contents (32-bit words, or 64-bit ones for wide types) as a type."""
    if kind in ("u32", "x32"):
        return words
    if kind == "f32":
        return words.view(F32)
    if kind == "i32":
        return words.view(np.int32)
    if kind in _WIDE:
        return words.view(_WIDE[kind])
    if kind == "bf16":
        return (words << U32(16)).view(F32)
    return words.astype(np.uint16).view(_HALF[kind])


def _with_sign(read: Reader, operand: Operand, kind: str) -> Reader:
    """Apply `|x|` and `-x` to a floating-point operand."""
    if not operand.negate and not operand.absolute:
        return read
    if kind not in _FLOATS:
        raise AssemblyError(f"operand {operand.text!r}: a sign modifier needs a floating-point operand, not {kind}.")
    absolute, negate = operand.absolute, operand.negate

    def with_sign(machine: Machine) -> Array:
        value = read(machine)
        if kind == "x32":
            value = value & U32(0x7FFFFFFF) if absolute else value
            return value ^ U32(0x80000000) if negate else value
        value = np.abs(value) if absolute else value
        return -value if negate else value

    return with_sign


def _raw_reader(operand: Operand, wide: bool, kind: str) -> Reader:
    """Words (or double words) of an operand, before typing; vector context."""
    index = operand.index
    if operand.kind is Kind.VECTOR:
        return (lambda m: m.waves.vector64(index)) if wide else (lambda m: m.waves.vector(index))
    if operand.kind is Kind.SCALAR:
        if index == SCC:
            return lambda m: m.waves.scc[m.waves.chosen].astype(U32)[:, None]
        if wide and operand.count == 1:
            return lambda m: m.waves.scalar(index).astype(U64)[:, None]
        return (lambda m: m.waves.scalar64(index)[:, None]) if wide else (lambda m: m.waves.scalar(index)[:, None])
    constant = np.array([[constant_bits(operand, kind)]], dtype=U64 if wide else U32)
    return lambda m: constant


def vector_reader(operand: Operand, kind: str, high: bool = False) -> Reader:
    """Read an operand of a vector instruction.

    Args:
        operand: The operand.
        kind: Type name.
        high: For 16-bit types, whether `op_sel` selects the upper half.
    """
    if kind == "mask":
        return _mask_reader(operand)
    read = _raw_reader(operand, kind in _WIDE, kind)
    if kind in _HALF:
        upper = operand.half == "h" or (high and operand.kind in (Kind.VECTOR, Kind.SCALAR))
        words = read
        read = (lambda m: words(m) >> U32(16)) if upper else (lambda m: words(m) & U32(0xFFFF))
    if operand.kind in (Kind.INTEGER, Kind.FLOAT, Kind.ABSENT):
        fixed = typed(read(None), kind)  # type: ignore[arg-type]  # a constant needs no machine
        return _with_sign(lambda m: fixed, operand, kind)
    plain = read
    return _with_sign(plain if kind in ("u32", "x32") else (lambda m: typed(plain(m), kind)), operand, kind)


def _mask_reader(operand: Operand) -> Reader:
    if operand.kind is Kind.SCALAR:
        index = operand.index
        return lambda m: m.waves.lane_mask(index)
    if operand.kind is Kind.INTEGER and operand.index in (0, -1):
        fixed = np.array([[operand.index == -1]])
        return lambda m: fixed
    raise AssemblyError(f"operand {operand.text!r} cannot be read as a lane mask.")


def scalar_reader(operand: Operand, kind: str) -> Reader:
    """Read an operand of a scalar instruction, [chosen] (or [1] for a constant)."""
    wide = kind in _WIDE
    index = operand.index
    if operand.kind is Kind.SCALAR:
        if index == SCC:
            return lambda m: m.waves.scc[m.waves.chosen].astype(U32)
        if wide:
            if operand.count == 1:
                return lambda m: m.waves.scalar(index).astype(U64)
            return lambda m: typed(m.waves.scalar64(index), kind)
        if kind == "u32":
            return lambda m: m.waves.scalar(index)
        if kind in _HALF:
            return lambda m: typed(m.waves.scalar(index) & U32(0xFFFF), kind)
        return _with_sign(lambda m: typed(m.waves.scalar(index), kind), operand, kind)
    if kind == "k16":
        immediate = np.array([((operand.index & 0xFFFF) ^ 0x8000) - 0x8000], np.int32)
        return lambda m: immediate
    fixed = typed(np.array([constant_bits(operand, kind)], dtype=U64 if wide else U32), kind)
    return lambda m: fixed


def words_of(value: Array, kind: str) -> Words:
    """A 32-bit (or 16-bit, in the low half) result as register contents."""
    if kind == "f32":
        return np.ascontiguousarray(value, dtype=F32).view(U32)
    if kind == "f16":
        return np.ascontiguousarray(value, dtype=np.float16).view(np.uint16).astype(U32)
    if kind == "bf16":
        return f32_to_bf16(value)
    if kind in ("u16", "i16"):
        return value.astype(U32) & U32(0xFFFF)
    if value.dtype == U32:
        return value
    if value.dtype == np.int32:
        return np.ascontiguousarray(value).view(U32)
    return (value.astype(np.int64) & 0xFFFFFFFF).astype(U32)


def double_words_of(value: Array) -> NDArray[np.uint64]:
    """A 64-bit result as register contents."""
    return np.ascontiguousarray(value).view(U64) if value.dtype != U64 else value


def op_sel(instruction: Instruction, position: int) -> bool:
    """Whether `op_sel` selects the upper half for operand number `position` (sources from 0, destination last)."""
    bits = instruction.modifiers.get("op_sel")
    return isinstance(bits, list) and position < len(bits) and bool(bits[position])
