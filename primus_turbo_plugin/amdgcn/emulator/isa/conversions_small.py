"""Conversions to and from 8-bit and 4-bit floating point, with and without a block scale.

Source: CDNA "VOP1", "VOP3A" (`v_cvt_*fp8*`, `v_cvt_scalef32_*`). The scale operand is a float of which only the exponent
counts: values are divided by it on the way down and multiplied on the way up. `op_sel` chooses the byte or word of the
small-format register; the rest of a destination is preserved.

The stochastic forms (`v_cvt_*_sr_*`) are left out: the guide does not say which bits decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa.formats import E2M1, SmallFloat, e8m0, eight_bit
from primus_turbo_plugin.amdgcn.emulator.isa.registry import ALL, GFX950, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, f32_to_bf16, op_sel, typed, vector_reader, words_of
from primus_turbo_plugin.amdgcn.emulator.waves import U32

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

F32 = np.float32


def _format(name: str, arch: str) -> SmallFloat:
    return E2M1 if name == "fp4" else eight_bit(name, arch)


def _scale_exponent(value: Array) -> Array:
    """Unbiased exponent of a float scale."""
    return ((np.ascontiguousarray(value, dtype=F32).view(U32) >> U32(23)) & U32(0xFF)).astype(np.int64) - 127


def _merge(machine: Machine, register_index: int, bits: Array, shift: int, width: int) -> None:
    """Insert `width` bits at `shift`, keeping the rest of the register."""
    mask = ((1 << width) - 1) << shift
    previous = machine.waves.vector(register_index) & U32(0xFFFFFFFF ^ mask)
    machine.waves.write_vector(register_index, previous | (bits.astype(U32) << U32(shift)))


def _pair(machine: Machine, instruction: Instruction, source: str) -> tuple[Array, Array]:
    """The two values of a packing conversion: two f32 operands, or the halves of one operand."""
    operands = instruction.operands
    if source == "f32":
        return vector_reader(operands[1], "f32")(machine), vector_reader(operands[2], "f32")(machine)
    word = vector_reader(operands[1], "u32")(machine)
    return typed(word & U32(0xFFFF), source), typed(word >> U32(16), source)


def _bind_pack(instruction: Instruction) -> Execute:
    """v_cvt[_scalef32]_pk_{fp8,bf8,fp4}_{f32,f16,bf16}: two values to two codes."""
    parts = instruction.opcode.split("_")
    scaled, small, source = "scalef32" in parts, parts[-2], parts[-1]
    select = instruction.vector("op_sel", 4)
    if small == "fp4":
        shift, width = 8 * (select[2] + 2 * select[3]), 8
    else:
        shift, width = 16 * op_sel(instruction, len(instruction.operands) - 1), 16
    read_scale = vector_reader(instruction.operands[-1], "f32")
    target = instruction.operands[0].index

    def execute(machine: Machine) -> None:
        layout = _format(small, machine.arch.name)
        first, second = (value.astype(np.float64) for value in _pair(machine, instruction, source))
        if scaled:
            exponent = -_scale_exponent(read_scale(machine))
            first, second = np.ldexp(first, exponent), np.ldexp(second, exponent)
        low, high = layout.encode(first).astype(U32), layout.encode(second).astype(U32)
        _merge(machine, target, low | (high << U32(layout.bits)), shift, width)

    return execute


def _bind_unpack(instruction: Instruction) -> Execute:
    """v_cvt_scalef32_pk_{f32,f16,bf16}_{fp8,bf8,fp4}, v_cvt_pk_f32_{fp8,bf8}: two codes to two values."""
    parts = instruction.opcode.split("_")
    scaled, wide, small = "scalef32" in parts, parts[-2], parts[-1]
    select = instruction.vector("op_sel", 2)
    shift = 8 * (select[0] + 2 * select[1]) if small == "fp4" else 16 * select[0]
    if instruction.word("src0_sel", "DWORD") == "WORD_1":
        shift = 16
    read = vector_reader(instruction.operands[1], "u32")
    read_scale = vector_reader(instruction.operands[-1], "f32")
    target = instruction.operands[0].index

    def execute(machine: Machine) -> None:
        layout = _format(small, machine.arch.name)
        word = read(machine) >> U32(shift)
        mask = U32((1 << layout.bits) - 1)
        values = [layout.decode(word & mask), layout.decode((word >> U32(layout.bits)) & mask)]
        if scaled:
            exponent = _scale_exponent(read_scale(machine))
            values = [np.ldexp(value.astype(np.float64), exponent).astype(F32) for value in values]
        if wide == "f32":
            for offset, value in enumerate(values):
                machine.waves.write_vector(target + offset, np.ascontiguousarray(value).view(U32))
            return
        if wide == "bf16":
            low, high = (f32_to_bf16(value) for value in values)
        else:
            low, high = (np.ascontiguousarray(value.astype(np.float16)).view(np.uint16).astype(U32) for value in values)
        machine.waves.write_vector(target, low | (high << U32(16)))

    return execute


def _bind_single(instruction: Instruction) -> Execute:
    """v_cvt[_scalef32]_f32_{fp8,bf8}: one code, chosen by `op_sel` or SDWA, to float32."""
    parts = instruction.opcode.split("_")
    select = instruction.vector("op_sel", 2)
    shift = 8 * (select[0] + 2 * select[1])
    word = instruction.word("src0_sel", "DWORD")
    if word.startswith("BYTE_"):
        shift = 8 * int(word[5:])
    if "byte_sel" in instruction.modifiers:
        shift = 8 * instruction.number("byte_sel")
    read = vector_reader(instruction.operands[1], "u32")
    read_scale = vector_reader(instruction.operands[-1], "f32")
    target = instruction.operands[0].index

    def execute(machine: Machine) -> None:
        value = _format(parts[-1], machine.arch.name).decode((read(machine) >> U32(shift)) & U32(0xFF))
        if "scalef32" in parts:
            value = np.ldexp(value.astype(np.float64), _scale_exponent(read_scale(machine))).astype(F32)
        machine.waves.write_vector(target, np.ascontiguousarray(value).view(U32))

    return execute


def _bind_pack_eight(instruction: Instruction) -> Execute:
    """v_cvt_scalef32_pk8_{fp8,bf8,fp4}_{f32,f16,bf16}: eight values, divided by a float scale, to eight codes."""
    parts = instruction.opcode.split("_")
    small, source = parts[-2], parts[-1]
    target, values, scale = instruction.operands
    read_scale = vector_reader(scale, "f32")

    def execute(machine: Machine) -> None:
        layout = _format(small, machine.arch.name)
        exponent = -_scale_exponent(read_scale(machine))
        words = [np.zeros((1, 1), U32) for _ in range(layout.bits // 4)]
        for number in range(8):
            if source == "f32":
                value = vector_reader(values.shifted(number, 1), "f32")(machine)
            else:
                value = vector_reader(values.shifted(number // 2, 1), source, bool(number % 2))(machine)
            code = layout.encode(np.ldexp(value.astype(np.float64), exponent)).astype(U32)
            register_number, shift = divmod(number * layout.bits, 32)
            words[register_number] = words[register_number] | (code << U32(shift))
        for number, word in enumerate(words):
            machine.waves.write_vector(target.index + number, word)

    return execute


def _bind_unpack_eight(instruction: Instruction) -> Execute:
    """v_cvt_scale_pk8_{f32,f16,bf16}_{fp8,bf8,fp4}: eight codes, times an e8m0 scale (low byte), to eight values."""
    parts = instruction.opcode.split("_")
    wide, small = parts[-2], parts[-1]
    target, codes, scale = instruction.operands
    read_scale = vector_reader(scale, "u32")

    def execute(machine: Machine) -> None:
        layout = _format(small, machine.arch.name)
        factor = e8m0(read_scale(machine) & U32(0xFF))
        results = []
        for number in range(8):
            register_number, shift = divmod(number * layout.bits, 32)
            word = vector_reader(codes.shifted(register_number, 1), "u32")(machine)
            code = (word >> U32(shift)) & U32((1 << layout.bits) - 1)
            results.append(words_of((layout.decode(code) * factor).astype(F32), wide))
        if wide != "f32":
            results = [results[2 * i] | (results[2 * i + 1] << U32(16)) for i in range(4)]
        for number, word in enumerate(results):
            machine.waves.write_vector(target.index + number, word)

    return execute


_FAMILY = "vector small-float conversion"
for _small in ("fp8", "bf8"):
    register(f"v_cvt_pk_{_small}_f32", _bind_pack, family=_FAMILY, source="CDNA, RDNA4: VOP3A", archs=ALL,
             meaning=f"D.word = {{{_small}(S1), {_small}(S0)}}", modifiers=("op_sel",))  # fmt: skip
    register(f"v_cvt_pk_f32_{_small}", _bind_unpack, family=_FAMILY, source="CDNA, RDNA4: VOP1", archs=ALL,
             meaning="D = two floats from the codes of a word", modifiers=("op_sel", "src0_sel"))  # fmt: skip
    register(f"v_cvt_f32_{_small}", _bind_single, family=_FAMILY, source="CDNA, RDNA4: VOP1", archs=ALL,
             meaning="D = float from one code", modifiers=("op_sel", "src0_sel", "byte_sel"))  # fmt: skip
    register(f"v_cvt_scalef32_f32_{_small}", _bind_single, family=_FAMILY, source="CDNA4: VOP3A", archs=GFX950,
             meaning="D = scale * float from one code", modifiers=("op_sel",))  # fmt: skip
for _small in ("fp8", "bf8", "fp4"):
    for _wide in ("f32", "f16", "bf16"):
        register(f"v_cvt_scalef32_pk_{_small}_{_wide}", _bind_pack, family=_FAMILY, source="CDNA4: VOP3A", archs=GFX950,
                 meaning=f"D.part = two {_small} codes of values / scale", modifiers=("op_sel",))  # fmt: skip
        register(f"v_cvt_scalef32_pk_{_wide}_{_small}", _bind_unpack, family=_FAMILY, source="CDNA4: VOP3A", archs=GFX950,
                 meaning=f"D = two {_wide} values of {_small} codes times scale", modifiers=("op_sel",))  # fmt: skip
        register(f"v_cvt_scalef32_pk8_{_small}_{_wide}", _bind_pack_eight, family=_FAMILY, source="LLVM: gfx1250", archs=GFX1250,
                 meaning=f"D = eight {_small} codes of values / scale")  # fmt: skip
        register(f"v_cvt_scale_pk8_{_wide}_{_small}", _bind_unpack_eight, family=_FAMILY, source="LLVM: gfx1250", archs=GFX1250,
                 meaning=f"D = eight {_wide} values of {_small} codes times an e8m0 scale")  # fmt: skip
