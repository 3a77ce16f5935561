"""Reading assembly text."""

from __future__ import annotations

import pytest

from primus_turbo_plugin.amdgcn.assembly.instructions import parse_instruction
from primus_turbo_plugin.amdgcn.assembly.operands import ACCUMULATION_BASE, EXEC, M0, TTMP, VCC, Kind, parse_operand
from primus_turbo_plugin.amdgcn.assembly.program import parse_program
from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.faults import AssemblyError
from tests.amdgcn.single import kernel


@pytest.mark.parametrize(
    ("text", "kind", "index", "count"),
    [
        ("v17", Kind.VECTOR, 17, 1),
        ("v[4:7]", Kind.VECTOR, 4, 4),
        ("a3", Kind.VECTOR, ACCUMULATION_BASE + 3, 1),
        ("s[8:23]", Kind.SCALAR, 8, 16),
        ("vcc", Kind.SCALAR, VCC, 2),
        ("exec_lo", Kind.SCALAR, EXEC, 1),
        ("m0", Kind.SCALAR, M0, 1),
        ("ttmp9", Kind.SCALAR, TTMP + 9, 1),
        ("0x7fff80", Kind.INTEGER, 0x7FFF80, 1),
        ("-16", Kind.INTEGER, -16, 1),
        ("off", Kind.ABSENT, 0, 1),
        (".LBB0_4", Kind.SYMBOL, 0, 1),
    ],
)
def test_operands_name_registers_and_constants(text: str, kind: Kind, index: int, count: int) -> None:
    operand = parse_operand(text)
    assert (operand.kind, operand.index, operand.count) == (kind, index, count)


@pytest.mark.parametrize(
    ("text", "negate", "absolute"),
    [
        ("-v3", True, False),
        ("|v3|", False, True),
        ("-|v3|", True, True),
        ("neg(s4)", True, False),
        ("abs(v1)", False, True),
    ],
)
def test_sign_modifiers_are_separated_from_the_register(text: str, negate: bool, absolute: bool) -> None:
    operand = parse_operand(text)
    assert operand.kind in (Kind.VECTOR, Kind.SCALAR)
    assert (operand.negate, operand.absolute) == (negate, absolute)


def test_a_negative_float_is_a_constant_not_a_modifier() -> None:
    operand = parse_operand("-0.5")
    assert (operand.kind, operand.value, operand.negate) == (Kind.FLOAT, -0.5, False)


def test_modifiers_follow_the_last_operand() -> None:
    instruction = parse_instruction("buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen offset:64 lds sc0")
    assert instruction.opcode == "buffer_load_dwordx4"
    assert [operand.text for operand in instruction.operands] == ["v[0:3]", "v4", "s[0:3]", "0"]
    assert instruction.modifiers == {"offen": 1, "offset": 64, "lds": 1, "sc0": 1}


def test_bracketed_modifiers_are_lists() -> None:
    instruction = parse_instruction("v_pk_fma_f32 v[0:1], v[2:3], s[4:5], v[6:7] op_sel_hi:[1,0,1] neg_lo:[0,1,0]")
    assert instruction.vector("op_sel_hi", 3) == [1, 0, 1]
    assert instruction.vector("op_sel", 3) == [0, 0, 0]


@pytest.mark.parametrize("suffix", ["_e32", "_e64", "_dpp", "_sdwa", "_e64_dpp"])
def test_encoding_suffixes_are_not_part_of_the_opcode(suffix: str) -> None:
    assert parse_instruction(f"v_add_f32{suffix} v0, v1, v2").opcode == "v_add_f32"


def test_registers_above_255_are_taken_from_the_comment() -> None:
    instruction = parse_instruction("v_wmma_f32_16x16x32_bf16 v[0:7] /*v[256:263]*/, v[8:15], v1 /*v257*/, v[0:7]")
    assert [operand.index for operand in instruction.operands] == [256, 8, 257, 0]


def test_dual_issue_text_gives_two_instructions_that_touch_all_registers() -> None:
    instruction = parse_instruction("v_dual_mov_b32 v1, v2 :: v_dual_add_f32 v3, v4, v5")
    assert instruction.dual is not None
    assert instruction.dual.opcode == "v_dual_add_f32"
    assert {index for _, index in instruction.touched} == {1, 2, 3, 4, 5}


def test_a_program_keeps_labels_and_source_lines() -> None:
    text = """
	.file	1 "/somewhere" "kernel.py"
kernel:
	.loc	1 7 3 prologue_end
	s_mov_b32 s0, 4 ; a comment
.LBB0_1:
	.loc	1 9 1 ; kernel.py:9:1 @[ helper.py:3:2 ]
	s_sub_i32 s0, s0, 1
	s_cbranch_scc1 .LBB0_1
	s_endpgm
	.section	.rodata
	s_nop 0
"""
    program = parse_program(text)
    assert [item.opcode for item in program.instructions] == ["s_mov_b32", "s_sub_i32", "s_cbranch_scc1", "s_endpgm"]
    assert program.target(program.instructions[2]) == 1
    assert str(program.instructions[0].source) == "kernel.py:7"
    assert str(program.instructions[1].source) == "kernel.py:9 (inlined at helper.py:3:2)"
    assert "line 5 of the assembly" in program.instructions[0].where


def test_a_branch_to_nowhere_is_an_error_that_names_the_label() -> None:
    program = parse_program("kernel:\n\ts_branch .LBB9\n\ts_endpgm\n")
    with pytest.raises(AssemblyError, match=r"label '\.LBB9'"):
        program.target(program.instructions[0])


def test_the_descriptor_lists_arguments_and_sizes() -> None:
    compiled = kernel("gfx950", "s_nop 0", pointers=3, waves=2, lds=512)
    descriptor = compiled.descriptor
    assert [argument.offset for argument in descriptor.arguments] == [0, 8, 16]
    assert (compiled.arch, compiled.num_warps, compiled.shared) == ("gfx950", 2, 512)
    assert descriptor.directive("user_sgpr_count") == 2


def test_text_without_a_kernel_is_refused() -> None:
    with pytest.raises(AssemblyError, match="no instruction found"):
        parse_program("\t.text\n")


def test_two_kernels_in_one_text_are_refused() -> None:
    text = kernel("gfx950", "s_nop 0").asm.replace(
        "    .name: kernel", "    .name: kernel\n  - .args: []\n    .name: other"
    )
    with pytest.raises(AssemblyError, match="exactly one kernel"):
        _ = CompiledKernel.from_assembly(text)
