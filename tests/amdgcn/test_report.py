"""The ISA report: loops, costs, occupancy, gates, rendering."""

from __future__ import annotations

import dataclasses
import json

import pytest

from primus_turbo_plugin.amdgcn.architecture import architecture
from primus_turbo_plugin.amdgcn.assembly.instructions import parse_instruction
from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.report.costs import lds_bytes, matrix_clocks, matrix_flops, memory_bytes
from primus_turbo_plugin.amdgcn.report.gate import IsaGate, check_gate
from primus_turbo_plugin.amdgcn.report.isa import IsaReport, isa_report
from primus_turbo_plugin.amdgcn.report.loops import find_loops, hot_loop
from primus_turbo_plugin.amdgcn.report.occupancy import occupancy
from primus_turbo_plugin.amdgcn.report.render import render, to_json
from primus_turbo_plugin.errors import UnsupportedError
from tests.amdgcn.single import kernel

LOOP = """
    s_mov_b32 s4, 4
    .LBB0_1:
    s_nop 0
    .LBB0_2:
    ds_read_b128 v[4:7], v1
    buffer_load_dwordx4 v2, s[8:11], 0 offen lds
    v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[4:7], v[0:3]
    v_add_u32 v1, v1, v2
    s_cbranch_scc1 .LBB0_2
    s_sub_i32 s4, s4, 1
    s_cbranch_scc1 .LBB0_1
    .LBB0_3:
    ds_read_b32 v8, v1
    s_cbranch_scc0 .LBB0_3
"""


def report(body: str = LOOP, arch: str = "gfx950", waves: int = 4, lds: int = 4096) -> IsaReport:
    return isa_report(kernel(arch, body, waves=waves, lds=lds))


def test_the_hot_loop_is_the_innermost_with_matrix_instructions() -> None:
    program = kernel("gfx950", LOOP).program
    assert [loop.label for loop in find_loops(program)] == [".LBB0_2", ".LBB0_1", ".LBB0_3"]
    loop = hot_loop(program)
    assert loop is not None
    assert (loop.label, len(loop.instructions), loop.matrix_instructions) == (".LBB0_2", 5, 1)


def test_two_branches_to_one_label_are_one_loop() -> None:
    text = ".LBB0_1:\ns_nop 0\ns_cbranch_scc1 .LBB0_1\nv_mov_b32 v0, v1\ns_cbranch_scc0 .LBB0_1"
    loops = find_loops(kernel("gfx950", text).program)
    assert [len(loop.instructions) for loop in loops] == [4]


def test_a_loop_that_waits_inside_the_working_loop_does_not_hide_it() -> None:
    text = """
        .LBB0_1:
        .LBB0_2:
        ds_read_b32 v8, v1
        s_cbranch_scc0 .LBB0_2
        v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[4:7], v[0:3]
        s_cbranch_scc1 .LBB0_1
    """
    loop = hot_loop(kernel("gfx950", text).program)
    assert loop is not None
    assert loop.label == ".LBB0_1"


def test_loop_figures_add_up() -> None:
    """4 waves on 4 SIMDs: one MFMA of 16 clocks, one LDS read and one transfer of 1 KiB a wave at 128 bytes a clock."""
    loop = report().loop
    assert loop is not None
    assert loop.mma_clocks == 2 * 16 * 16 * 32 / 1024
    assert loop.lds_clocks == 2 * 4 * 64 * 16 / 128
    assert loop.valu_clocks == 4
    assert loop.flops == 4 * 2 * 16 * 16 * 32
    assert loop.memory_bytes == 4 * 64 * 16
    assert report().bound_by == "lds"
    assert report().mma_share == pytest.approx(16 / 64)


@pytest.mark.parametrize(
    ("text", "arch", "clocks"),
    [  # passes of AMD's matrix instruction tables times four clocks
        ("v_mfma_f32_32x32x8_bf16 v[0:15], v[20:21], v[22:23], 0", "gfx942", 32),
        ("v_mfma_f32_32x32x16_bf16 v[0:15], v[20:23], v[24:27], 0", "gfx950", 32),
        ("v_mfma_f32_16x16x32_bf16 v[0:3], v[20:23], v[24:27], 0", "gfx950", 16),
        ("v_mfma_f32_32x32x2_f32 v[0:15], v20, v21, 0", "gfx942", 64),
        ("v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[20:21], v[22:23], 0", "gfx942", 16),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[20:23], v[24:27], 0, v1, v2 cbsz:4 blgp:4", "gfx950", 16),
        ("v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[20:27], v[30:37], 0, v1, v2", "gfx950", 32),
        ("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[20:21], v[22:23], 0", "gfx950", 4),
        ("v_wmma_f32_16x16x32_bf16 v[0:7], v[8:15], v[16:23], v[0:7]", "gfx1250", 8),
    ],
)
def test_matrix_clocks(text: str, arch: str, clocks: float) -> None:
    assert matrix_clocks(parse_instruction(text), architecture(arch)) == clocks


@pytest.mark.parametrize(
    ("text", "lds", "memory"),
    [
        ("ds_read_b64_tr_b16 v[0:1], v2", 8, 0),
        ("ds_load_tr16_b128 v[0:3], v4", 16, 0),
        ("ds_read2st64_b32 v[0:1], v2 offset1:1", 8, 0),
        ("ds_write_b16_d16_hi v0, v1", 2, 0),
        ("ds_read_u16 v0, v1", 2, 0),
        ("buffer_load_dwordx4 v2, s[8:11], 0 offen lds", 16, 16),
        ("global_load_lds_dwordx4 v[2:3], off", 16, 16),
        ("global_load_async_to_lds_b128 v1, v[2:3], off", 16, 16),
        ("global_store_dwordx2 v[0:1], v[2:3], off", 0, 8),
        ("buffer_store_short v0, v1, s[0:3], 0 offen", 0, 2),
        ("tensor_load_to_lds s[0:3], s[4:11]", 0, 0),
        ("v_add_f32 v0, v1, v2", 0, 0),
    ],
)
def test_bytes_a_lane_moves(text: str, lds: int, memory: int) -> None:
    instruction = parse_instruction(text)
    assert (lds_bytes(instruction), memory_bytes(instruction)) == (lds, memory)


def test_flops_count_blocks() -> None:
    assert matrix_flops(parse_instruction("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], 0")) == 2 * 4 * 4 * 4 * 16


@pytest.mark.parametrize(
    ("vgprs", "lds", "waves", "groups", "limit"),
    [
        (512, 1024, 4, 1, "VGPR"),
        (256, 1024, 4, 2, "VGPR"),
        (73, 0, 4, 6, "VGPR"),  # 80 after rounding to the granule; 7 would fit without
        (64, 81920, 4, 2, "LDS"),
        (64, 81921, 4, 1, "LDS"),
        (32, 0, 8, 4, "wave slots"),
        (512, 0, 8, 0, "VGPR"),
    ],
)
def test_occupancy(vgprs: int, lds: int, waves: int, groups: int, limit: str) -> None:
    held = occupancy(architecture("gfx950"), vgprs, lds, waves)
    assert (held.workgroups, held.limited_by) == (groups, limit)
    assert held.waves_per_simd == groups * waves / 4


def test_every_clause_of_a_gate_can_be_violated() -> None:
    base = report()
    assert check_gate(base, IsaGate(required=("v_mfma.*", "buffer_load_dwordx4 lds"), forbidden=("scratch_.*",))) == []
    spilled = dataclasses.replace(base, vgpr_spills=3, scratch_bytes=12)
    gates = {
        "3 vector registers spilled": (spilled, IsaGate(max_scratch_bytes=12)),
        "12 bytes of scratch": (spilled, IsaGate(max_spills=3)),
        "hot loop lacks an instruction matching 'v_wmma.*'": (base, IsaGate(required=("v_wmma.*",))),
        "kernel lacks an instruction matching 'tensor_.*'": (base, IsaGate(required_anywhere=("tensor_.*",))),
        "hot loop holds v_add_u32 x1, forbidden by 'v_add.*'": (base, IsaGate(forbidden=("v_add.*",))),
        "kernel holds ds_read_b32 x1": (base, IsaGate(forbidden_anywhere=("ds_read_b32",))),
        "bound by lds, must be by mma": (base, IsaGate(bound_by="mma")),
        "MMA share of the hot loop is 25%": (base, IsaGate(min_mma_share=0.9)),
        "vector registers, at most 2 allowed": (dataclasses.replace(base, vgprs=8), IsaGate(max_vgprs=2)),
        "fit a compute unit, at least 99 required": (base, IsaGate(min_workgroups=99)),
    }
    for message, (subject, gate) in gates.items():
        (problem,) = check_gate(subject, gate)
        assert message in problem
        assert problem.startswith("kernel on gfx950: ")


def test_a_gate_on_a_loop_needs_a_loop() -> None:
    straight = report("s_nop 0")
    assert "has no loop" in check_gate(straight, IsaGate(bound_by="mma"))[0]


def test_text_and_json_say_that_loop_figures_are_estimates() -> None:
    text = render(report(), violations=["kernel on gfx950: too slow"])
    assert "static estimate" in text
    assert "too slow" in text
    data = json.loads(json.dumps(to_json(report(), [])))
    assert data["loop_figures_are"] == "static estimate"
    assert data["loop_mix"]["buffer_load_dwordx4 lds"] == 1
    assert data["gate_violations"] == []
    assert "no loop" in render(report("s_nop 0"))


def test_unknown_targets_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="gfx942, gfx950, gfx1250, got 'gfx90a'"):
        _ = CompiledKernel.from_assembly(kernel("gfx950", "s_nop 0").asm, arch="gfx90a")
