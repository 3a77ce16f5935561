"""Clocks of single instructions, for the static estimate.

MMA: CDNA rates are AMD's published peak FLOP per clock and compute unit, divided by four SIMDs (MI300X, MI355X data sheets);
they agree with the passes of LLVM's scheduling model except that 8-bit operands of the f8f6f4 forms take twice the clocks
of 4-bit ones. gfx1250: 8 clocks per instruction in LLVM's model. LDS: bytes over peak bandwidth. VALU: clocks one plain
instruction occupies its SIMD. Nothing here was measured.
"""

from __future__ import annotations

import re

from primus_turbo_plugin.amdgcn.architecture import Architecture
from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa.access import parse_width
from primus_turbo_plugin.amdgcn.faults import AssemblyError

_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
_NARROW_FORMATS = (2, 3, 4)  # fp6, bf6, fp4 in cbsz / blgp
_TRANSPOSE = re.compile(r"ds_(?:read_b(\d+)_tr|load_tr\d+_b(\d+))")


def matrix_flops(instruction: Instruction) -> int:
    """Multiply-adds of one wave's matrix instruction, counted as two operations each."""
    match = _SHAPE.search(instruction.opcode)
    assert match is not None, instruction.where
    rows, columns, depth = (int(item) for item in match.groups())
    blocks = re.search(r"_(\d+)b_", instruction.opcode)
    return 2 * rows * columns * depth * (int(blocks[1]) if blocks else 1)


def _flops_per_clock(instruction: Instruction, arch: str) -> int:
    """Peak rate of one SIMD for an MFMA."""
    opcode = instruction.opcode
    match = _SHAPE.search(opcode)
    assert match is not None, instruction.where
    rows, _, depth = (int(item) for item in match.groups())
    if opcode.endswith("f64"):
        return 64 if arch == "gfx950" else 128
    if opcode.endswith("f8f6f4"):
        narrow = all(instruction.number(name) in _NARROW_FORMATS for name in ("cbsz", "blgp"))
        return 4096 if narrow else 2048
    if re.search(r"(fp8|bf8|i8)", opcode):
        wide = (rows, depth) in ((32, 32), (16, 64)) and arch == "gfx950"
        return 2048 if wide else 1024
    if opcode.endswith(("f16", "bf16")):
        return 1024 if (rows, depth) in ((32, 16), (16, 32)) else 512
    return 64


def matrix_clocks(instruction: Instruction, arch: Architecture) -> float:
    """Clocks a matrix instruction keeps its SIMD's matrix unit busy."""
    if arch.is_cdna:
        return matrix_flops(instruction) / _flops_per_clock(instruction, arch.name)
    return 8.0


def lds_bytes(instruction: Instruction) -> int:
    """Bytes one lane moves through LDS: loads, stores, and transfers straight into it. Zero for anything else."""
    opcode = instruction.opcode
    if (match := _TRANSPOSE.match(opcode)) is not None:
        return int(match[1] or match[2]) // 8
    if (
        match := re.match(r"ds_(?:read2|write2|load_2addr|store_2addr)(?:st64|_stride64)?_b(\d+)$", opcode)
    ) is not None:
        return 2 * int(match[1]) // 8
    if opcode.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")):
        return 4
    to_lds = "lds" in opcode or instruction.flag("lds")
    if opcode.startswith(("ds_read_", "ds_write_", "ds_load_", "ds_store_")) or (
        to_lds and not opcode.startswith("tensor")
    ):
        try:
            return parse_width(opcode.split("_", 2)[2] if opcode.startswith("ds_") else opcode.rsplit("_", 1)[1]).bytes
        except AssemblyError:
            return 0
    return 0


def memory_bytes(instruction: Instruction) -> int:
    """Bytes one lane moves between memory and registers or LDS; tensor transfers are not counted here."""
    opcode = instruction.opcode
    if not opcode.startswith(("global_load", "global_store", "buffer_load", "buffer_store", "flat_load", "flat_store")):
        return 0
    tail = opcode.rsplit("lds_", 1)[1] if "lds_" in opcode else opcode.split("_", 2)[2]
    try:
        return parse_width(tail).bytes
    except AssemblyError:
        return 0
