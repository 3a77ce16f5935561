"""Shared parts of the matrix instructions: operands to matrices, results to registers.

Products are formed in float32 (exact for 16-bit and smaller inputs) or float64 (block-scaled and float64), and summed in
numpy's order; hardware sums in its own, so results agree to rounding, not bit for bit, unless the sums are exact.
The execution mask plays no part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.assembly.operands import Kind, Operand
from primus_turbo_plugin.amdgcn.emulator.isa.formats import SmallFloat, unpack
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, constant_bits, vector_reader
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Ints

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

ElementType = str | SmallFloat


def element_bits(element: ElementType) -> int:
    """Width of an element."""
    if isinstance(element, SmallFloat):
        return element.bits
    return {"f16": 16, "bf16": 16, "f32": 32, "xf32": 32, "i8": 8, "u8": 8, "f64": 64}[element]


def operand_words(machine: Machine, operand: Operand, registers: int) -> NDArray[np.uint32]:
    """A matrix operand's registers, [chosen, lane, register]."""
    waves = machine.waves
    words = [waves.spread(vector_reader(operand.shifted(i, 1), "u32")(machine)) for i in range(registers)]
    return np.ascontiguousarray(np.stack(words, axis=-1))


def elements_of(words: NDArray[np.uint32], element: ElementType) -> Array:
    """Decode registers [chosen, lane, register] into values [chosen, lane, element], lowest bits first."""
    if isinstance(element, SmallFloat):
        return element.decode(unpack(words, element.bits))
    if element == "bf16":
        pairs = np.stack([words << U32(16), words & U32(0xFFFF0000)], axis=-1)
        return pairs.reshape(*words.shape[:-1], -1).view(np.float32)
    if element == "xf32":
        return ((words + U32(0x0FFF) + ((words >> U32(13)) & U32(1))) & U32(0xFFFFE000)).view(np.float32)
    dtype = {"f16": np.float16, "f32": np.float32, "i8": np.int8, "u8": np.uint8, "f64": np.float64}[element]
    values = words.view(dtype)
    return values.astype(np.float32) if element == "f16" else values


def place(values: Array, rows: Ints, columns: Ints, shape: tuple[int, int]) -> Array:
    """Scatter values [chosen, lane, element] into matrices [chosen, *shape] by their coordinates [lane, element]."""
    matrix = np.zeros((len(values), *shape), values.dtype)
    matrix[:, rows, columns] = values
    return matrix


def multiply(a: Array, b: Array) -> Array:
    """Batched a @ b.T for [..., rows, k] operands, in a type wide enough for the products."""
    wide = a.dtype if a.dtype.kind == "f" else np.dtype(np.int32)
    return np.matmul(a.astype(wide), np.swapaxes(b.astype(wide), -1, -2))


def accumulator(machine: Machine, operand: Operand, number: int, dtype: type) -> Array:
    """Element `number` of operand C for every lane, [chosen, lane], or a constant."""
    if operand.kind is Kind.VECTOR:
        if dtype == np.float64:
            value: Array = machine.waves.vector64(operand.index + 2 * number).view(np.float64)
        else:
            value = machine.waves.vector(operand.index + number).view(dtype)
    else:
        kind = "f32" if dtype == np.float32 else "f64" if dtype == np.float64 else "u32"
        bits = np.uint64 if dtype == np.float64 else U32
        value = np.array([[constant_bits(operand, kind)]], bits).view(dtype)
    return -value if operand.negate else value


def store_result(machine: Machine, target: int, values: list[Array]) -> None:
    """Write results to consecutive registers (pairs for float64), all lanes."""
    waves = machine.waves
    for number, value in enumerate(values):
        words = np.ascontiguousarray(value).view(U32)
        if value.dtype.itemsize == 8:
            waves.vgpr[target + 2 * number, waves.chosen] = words[:, 0::2]
            waves.vgpr[target + 2 * number + 1, waves.chosen] = words[:, 1::2]
        else:
            waves.vgpr[target + number, waves.chosen] = words
