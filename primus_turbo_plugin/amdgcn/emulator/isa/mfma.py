"""MFMA: CDNA's matrix instructions, block-scaled ones included.

Source: CDNA "Matrix arithmetic instructions" and AMD's matrix instruction calculator for the register layouts.

`v_mfma_f32_MxNxK[_Bb]_type` multiplies B independent blocks. With L = 64 lanes, lane l holds row (column) l % M of A (B),
block (l // M) % B, and a run of K values; the result keeps column l % N and rows in groups of four. `cbsz` broadcasts block
`abid` of A within groups of 2**cbsz blocks. xf32 inputs are rounded to 10 mantissa bits (which way is not documented).

The f8f6f4 forms read formats from `cbsz` (A) and `blgp` (B): 0 fp8, 1 bf8, 2 fp6, 3 bf6, 4 fp4. `v_mfma_scale_*` multiplies
each run of 32 along K by a power of two taken from the byte of the scale operand that `op_sel`/`op_sel_hi` choose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Operand
from primus_turbo_plugin.amdgcn.emulator.isa.formats import E2M1, E2M3, E3M2, E4M3, E5M2, e8m0, eight_bit
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
from primus_turbo_plugin.amdgcn.emulator.isa.registry import CDNA, GFX942, GFX950, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, vector_reader
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Ints
from primus_turbo_plugin.amdgcn.faults import UnknownInstructionError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

_LANES = 64
_NAME = re.compile(r"v_mfma(_scale)?_(f32|i32|f64)_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_(\w+)$")
_F8F6F4 = {0: E4M3, 1: E5M2, 2: E2M3, 3: E3M2, 4: E2M1}
_SCALE_BLOCK = 32


@dataclass(frozen=True, slots=True)
class _Shape:
    """M x N x K and the number of independent blocks."""

    rows: int
    columns: int
    depth: int
    blocks: int

    @property
    def results(self) -> int:
        """Result registers of a lane."""
        return self.rows * self.columns * self.blocks // _LANES


def _k_index(element: ElementType, per_lane: int, groups: int, group: Ints, f8f6f4: bool) -> Ints:
    """K coordinate of each element, [lane, element]. Eight-bit f8f6f4 operands come in two runs of 16."""
    number = np.arange(per_lane)
    if f8f6f4 and element_bits(element) == 8:
        return (number // 16)[None] * 16 * groups + group[:, None] * 16 + (number % 16)[None]
    return group[:, None] * per_lane + number[None]


def _operand_matrix(machine: Machine, operand: Operand, element: ElementType, shape: _Shape, f8f6f4: bool) -> Array:
    """One operand as [chosen, block, rows, K]."""
    lane = np.arange(_LANES)
    rows = shape.rows
    registers = rows * shape.depth * shape.blocks * element_bits(element) // (_LANES * 32)
    values = elements_of(operand_words(machine, operand, registers), element)
    block = lane // rows % shape.blocks
    groups = _LANES // (rows * shape.blocks)
    k = _k_index(element, values.shape[-1], groups, lane // (rows * shape.blocks), f8f6f4)
    row = (block * rows + lane % rows)[:, None]
    flat = place(values, np.broadcast_to(row, k.shape), k, (shape.blocks * rows, shape.depth))
    return flat.reshape(len(values), shape.blocks, rows, shape.depth)


def _result_coordinates(shape: _Shape, double: bool) -> tuple[Ints, Ints, Ints]:
    """Block, row and column of each result, [result, lane] each."""
    lane, number = np.arange(_LANES), np.arange(shape.results)
    per_block = shape.results if shape.rows == 4 else shape.results // shape.blocks
    block = np.broadcast_to((number // per_block)[:, None], (shape.results, _LANES))
    within = number % per_block
    if shape.rows == 32:
        row = 8 * (within // 4)[:, None] + 4 * (lane // 32)[None] + (within % 4)[:, None]
    elif double:
        row = (lane // 16)[None] + 4 * within[:, None]
    elif shape.rows == 16:
        row = 4 * (lane // 16)[None] + within[:, None]
    else:
        row = np.broadcast_to(within[:, None], (shape.results, _LANES))
        block = np.broadcast_to((lane // 4)[None], (shape.results, _LANES))
    return block, row, np.broadcast_to((lane % shape.columns)[None], row.shape)


def _scales(machine: Machine, operand: Operand, byte: int, shape: _Shape) -> Array:
    """Scale of every (row, K) of an operand, [chosen, 1, rows, K]; lane group g scales the g-th run of 32."""
    words = machine.waves.spread(vector_reader(operand, "u32")(machine))
    factors = e8m0((words >> U32(8 * byte)) & U32(0xFF))
    groups = _LANES // shape.rows
    by_row = factors.reshape(len(words), groups, shape.rows).transpose(0, 2, 1)
    assert shape.depth // groups == _SCALE_BLOCK, "one lane group per block of 32"
    return np.repeat(by_row, _SCALE_BLOCK, axis=2)[:, None]


def _elements(instruction: Instruction, types: str, arch: str) -> tuple[ElementType, ElementType]:
    if types == "f8f6f4":
        return _F8F6F4[instruction.number("cbsz")], _F8F6F4[instruction.number("blgp")]
    names = types.split("_") if types.startswith(("fp8", "bf8")) else [types, types]
    first, second = (eight_bit(name, arch) if name in ("fp8", "bf8") else name for name in names)
    return first, second


def _bind(instruction: Instruction) -> Execute:
    """D = A @ B + C."""
    match = _NAME.match(instruction.opcode)
    assert match is not None, instruction.where
    scaled, kind, rows, columns, depth, blocks, types = match.groups()
    shape = _Shape(int(rows), int(columns), int(depth), int(blocks or 1))
    f8f6f4 = types == "f8f6f4"
    if not f8f6f4 and instruction.flag("blgp"):
        raise UnknownInstructionError(f"{instruction.where}: lane-group permutes of B are not emulated.")
    group = 1 << (0 if f8f6f4 else instruction.number("cbsz"))
    source_block = np.arange(shape.blocks) // group * group + (0 if f8f6f4 else instruction.number("abid"))
    target, a, b, c, *scale = instruction.operands
    low, high = instruction.vector("op_sel", 2), instruction.vector("op_sel_hi", 2)
    dtype = {"f32": np.float32, "f64": np.float64, "i32": np.int32}[kind]

    def execute(machine: Machine) -> None:
        first, second = _elements(instruction, types, machine.arch.name)
        left = _operand_matrix(machine, a, first, shape, f8f6f4)[:, source_block]
        right = _operand_matrix(machine, b, second, shape, f8f6f4)
        if scaled:
            left = left * _scales(machine, scale[0], low[0] | (high[0] << 1), shape)
            right = right * _scales(machine, scale[1], low[1] | (high[1] << 1), shape)
        block, row, column = _result_coordinates(shape, kind == "f64")
        products = multiply(left, right)[:, block, row, column]  # [chosen, result, lane]
        results = [(products[:, i] + accumulator(machine, c, i, dtype)).astype(dtype) for i in range(shape.results)]
        store_result(machine, target.index, results)

    return execute


_BOTH = (
    [f"f32_{shape}_{kind}" for kind in ("f16", "bf16") for shape in
     ("32x32x8", "16x16x16", "32x32x4_2b", "16x16x4_4b", "4x4x4_16b")]
    + [f"f32_{shape}_f32" for shape in ("32x32x2", "16x16x4", "32x32x1_2b", "16x16x1_4b", "4x4x1_16b")]
    + [f"i32_{shape}_i8" for shape in ("32x32x16", "16x16x32", "32x32x4_2b", "16x16x4_4b", "4x4x4_16b")]
    + [f"f32_{shape}_{a}_{b}" for shape in ("16x16x32", "32x32x16") for a in ("fp8", "bf8") for b in ("fp8", "bf8")]
)  # fmt: skip
_ONLY_942 = ["f32_32x32x4_xf32", "f32_16x16x8_xf32"]
_ONLY_950 = (
    [f"f32_{shape}_{kind}" for kind in ("f16", "bf16") for shape in ("32x32x16", "16x16x32")]
    + ["i32_32x32x32_i8", "i32_16x16x64_i8", "f32_16x16x128_f8f6f4", "f32_32x32x64_f8f6f4"]
)  # fmt: skip
_MODIFIERS = ("cbsz", "abid", "blgp")
for _names, _archs in ((_BOTH, CDNA), (_ONLY_942, GFX942), (_ONLY_950, GFX950), (["f64_16x16x4_f64"], CDNA)):
    register([f"v_mfma_{name}" for name in _names], _bind, family="mfma", source="CDNA: VOP3P-MAI", meaning="D = A @ B + C",
             archs=_archs, modifiers=_MODIFIERS)  # fmt: skip
register("v_mfma_scale_f32_16x16x128_f8f6f4 v_mfma_scale_f32_32x32x64_f8f6f4", _bind, family="scaled mfma",
         source="CDNA4: VOP3P-MAI; LLVM", meaning="D = (A * scale_a) @ (B * scale_b) + C", archs=GFX950,
         modifiers=(*_MODIFIERS, "op_sel", "op_sel_hi"))  # fmt: skip
