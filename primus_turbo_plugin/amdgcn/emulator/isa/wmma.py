"""WMMA of gfx1250: 16x16 and 32x16 wave-32 matrix instructions, block-scaled ones included.

Source: LLVM `int_amdgcn_wmma_*` for gfx1250; register layouts from Triton's AMD backend (WMMA version 3), which the tests run
against. Lane l holds row (column) l % 16 of A (B). A 16-bit operand interleaves K in runs of 8 between the two lane
halves, an 8-bit one in runs of 16, a 4-bit one in runs of 32, a 32-bit one in runs of 2. Register r of lane l of the result is
row 8 * (l // 16) + r, column l % 16. `v_wmma_*_32x16x128_f4` is two such products stacked along M.

Scales: lane l < 16 (or l >= 16 with `MATRIX_SCALE_ROW1`) holds, in four bytes, the scales of row l % 16 for the four runs of
32 along K; `scale16` forms hold eight bytes for runs of 16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Operand
from primus_turbo_plugin.amdgcn.emulator.isa.formats import E2M1, E2M3, E3M2, E4M3, E5M2, e8m0, unpack
from primus_turbo_plugin.amdgcn.emulator.isa.matrix import (
    ElementType,
    accumulator,
    element_bits,
    elements_of,
    multiply,
    operand_words,
    place,
    store_result,
)
from primus_turbo_plugin.amdgcn.emulator.isa.registry import GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, f32_to_bf16
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Ints
from primus_turbo_plugin.amdgcn.faults import UnknownInstructionError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

_NAME = re.compile(r"v_wmma_(?:(scale16|scale)_)?(f32|f16|bf16|i32|bf16f32)_(\d+)x(\d+)x(\d+)_(\w+)$")
_FORMATS: dict[str, ElementType] = {
    "MATRIX_FMT_FP8": E4M3, "MATRIX_FMT_BF8": E5M2, "MATRIX_FMT_FP6": E2M3, "MATRIX_FMT_BF6": E3M2, "MATRIX_FMT_FP4": E2M1,
}  # fmt: skip
_EIGHT_BIT: dict[str, ElementType] = {"fp8": E4M3, "bf8": E5M2}
_RUN = {4: 32, 6: 32, 8: 16, 16: 8, 32: 2}
_LANES, _SIDE = 32, 16


def _k_index(element: ElementType, per_lane: int) -> Ints:
    """K coordinate of each element, [lane, element]."""
    run = min(_RUN[element_bits(element)], per_lane)
    number, half = np.arange(per_lane), np.arange(_LANES) // _SIDE
    return (number // run)[None] * 2 * run + half[:, None] * run + (number % run)[None]


def _operand_matrix(machine: Machine, operand: Operand, element: ElementType, depth: int) -> Array:
    """A 16 x K operand as [chosen, 16, K]."""
    registers = _SIDE * depth * element_bits(element) // (_LANES * 32)
    values = elements_of(operand_words(machine, operand, registers), element)
    k = _k_index(element, values.shape[-1])
    row = np.broadcast_to((np.arange(_LANES) % _SIDE)[:, None], k.shape)
    return place(values, row, k, (_SIDE, depth))


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where the scales of one operand are."""

    operand: Operand
    upper_lanes: bool
    registers: int

    def factors(self, machine: Machine, depth: int) -> Array:
        """[chosen, 16, K]."""
        start = _SIDE if self.upper_lanes else 0
        words = operand_words(machine, self.operand, self.registers)[:, start : start + _SIDE]
        codes = unpack(words, 8)  # [chosen, 16, runs]
        return np.repeat(e8m0(codes), depth // codes.shape[-1], axis=2)


def _scale(instruction: Instruction, operand: Operand, side: str, registers: int) -> _Scale:
    if instruction.word(f"matrix_{side}_scale_fmt", "MATRIX_SCALE_FMT_E8") != "MATRIX_SCALE_FMT_E8":
        raise UnknownInstructionError(f"{instruction.where}: only e8m0 scales are emulated.")
    return _Scale(operand, instruction.word(f"matrix_{side}_scale").endswith("ROW1"), registers)


def _elements(instruction: Instruction, types: str) -> tuple[ElementType, ElementType]:
    if types == "f8f6f4":
        first, second = (_FORMATS[instruction.word(f"matrix_{side}_fmt", "MATRIX_FMT_FP8")] for side in "ab")
        return first, second
    if types == "f4":
        return E2M1, E2M1
    if types in ("f16", "bf16", "f32"):
        return types, types
    if types == "iu8":
        signed = instruction.vector("neg_lo", 2)
        return ("i8" if signed[0] else "u8"), ("i8" if signed[1] else "u8")
    first, second = (_EIGHT_BIT[name] for name in types.split("_"))
    return first, second


def _half(machine: Machine, a: Operand, b: Operand, elements: tuple[ElementType, ElementType], depth: int,
          scales: tuple[_Scale, _Scale] | None) -> Array:  # fmt: skip
    """One 16 x 16 product as [chosen, register, lane]."""
    left = _operand_matrix(machine, a, elements[0], depth)
    right = _operand_matrix(machine, b, elements[1], depth)
    if scales is not None:
        left = left * scales[0].factors(machine, depth)
        right = right * scales[1].factors(machine, depth)
    lane, number = np.arange(_LANES), np.arange(8)
    row = 8 * (lane // _SIDE)[None] + number[:, None]
    return multiply(left, right)[:, row, np.broadcast_to((lane % _SIDE)[None], row.shape)]


def _store(machine: Machine, instruction: Instruction, kind: str, products: Array, offset: int) -> None:
    """Add C and write eight results per lane; 16-bit results are packed in pairs."""
    target, c = instruction.operands[0], instruction.operands[3]
    if kind in ("f32", "i32"):
        dtype = np.float32 if kind == "f32" else np.int32
        values = [(products[:, i] + accumulator(machine, c, offset + i, dtype)).astype(dtype) for i in range(8)]
        store_result(machine, target.index + offset, values)
        return
    addends = elements_of(
        operand_words(machine, c, 8 if kind == "bf16f32" else 4), "f32" if kind == "bf16f32" else kind
    )
    total = products + addends.transpose(0, 2, 1).astype(np.float32)
    if kind == "f16":
        bits = np.ascontiguousarray(total.astype(np.float16)).view(np.uint16).astype(U32)
    else:
        bits = f32_to_bf16(total.astype(np.float32))
    store_result(machine, target.index, [bits[:, 2 * i] | (bits[:, 2 * i + 1] << U32(16)) for i in range(4)])


def _bind(instruction: Instruction) -> Execute:
    """D = A @ B + C."""
    match = _NAME.match(instruction.opcode)
    assert match is not None, instruction.where
    scaled, kind, rows, _, depth, types = match.groups()
    if types != "iu8" and (any(instruction.vector("neg_lo", 2)[:2]) or any(instruction.vector("neg_hi", 2)[:2])):
        raise UnknownInstructionError(f"{instruction.where}: negating A or B is not emulated.")
    elements = _elements(instruction, types)
    _, a, b, _, *scale = instruction.operands
    registers = 2 if scaled == "scale16" else 1
    halves = int(rows) // _SIDE
    a_registers = _SIDE * int(depth) * element_bits(elements[0]) // (_LANES * 32)

    def execute(machine: Machine) -> None:
        products = []
        for half in range(halves):
            scales = None
            if scaled:
                first = _scale(instruction, scale[0], "a", registers)
                if halves == 2:  # rows 16-31 take the scales of lanes 16-31
                    first = _Scale(scale[0], half == 1, registers)
                scales = first, _scale(instruction, scale[1], "b", registers)
            part = a.shifted(half * a_registers, a_registers) if halves == 2 else a
            products.append(_half(machine, part, b, elements, int(depth), scales))
        for half, product in enumerate(products):
            _store(machine, instruction, kind, product, 8 * half)

    return execute


_NAMES = (
    ["f32_16x16x32_f16", "f32_16x16x32_bf16", "f16_16x16x32_f16", "bf16_16x16x32_bf16", "bf16f32_16x16x32_bf16",
     "f32_16x16x4_f32", "i32_16x16x64_iu8", "f32_16x16x128_f8f6f4", "f32_32x16x128_f4"]
    + [f"{kind}_16x16x{k}_{a}_{b}" for kind in ("f32", "f16") for k in (64, 128) for a in ("fp8", "bf8") for b in ("fp8", "bf8")]
)  # fmt: skip
_SCALED = [f"{scale}_f32_{shape}" for scale in ("scale", "scale16") for shape in ("16x16x128_f8f6f4", "32x16x128_f4")]
_MODIFIERS = ("neg_lo", "neg_hi", "matrix_a_fmt", "matrix_b_fmt")
register([f"v_wmma_{name}" for name in _NAMES], _bind, family="wmma", source="LLVM, Triton: gfx1250", meaning="D = A @ B + C",
         archs=GFX1250, modifiers=_MODIFIERS)  # fmt: skip
register([f"v_wmma_{name}" for name in _SCALED], _bind, family="scaled wmma", source="LLVM, Triton: gfx1250",
         meaning="D = (A * scale_a) @ (B * scale_b) + C", archs=GFX1250,
         modifiers=(*_MODIFIERS, "matrix_a_scale", "matrix_b_scale", "matrix_a_scale_fmt", "matrix_b_scale_fmt"))  # fmt: skip
