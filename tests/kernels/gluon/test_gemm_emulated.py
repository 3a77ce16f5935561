"""The Gluon GEMMs of every architecture compiled, emulated against float64 with deferred transfers and race checks on, and gated.

Nothing here was measured or has run on hardware. What is particular to one architecture, and the mutants that show that a missing
wait, barrier, lane map or bound is noticed, are in the files of that architecture.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin.kernels.gluon import gemm_gfx950

if (reason := gemm_gfx950.triton_refusal()) is not None:
    pytest.skip(reason, allow_module_level=True)

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.kernels.gluon.gemm_targets import plain, quantized, values
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.kernels.gluon.emulated import GFX950, ROOMS, Room

MXFP4, MXFP8 = QuantSpec(format=Format.MXFP4), QuantSpec(format=Format.MXFP8)


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest) -> Room:
    return ROOMS[request.param]


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, room in ROOMS.items() for name in room.targets])
def test_the_emulated_kernel_agrees_with_float64_and_its_code_passes_the_gate(arch: str, name: str, seed: int) -> None:
    target = ROOMS[arch].targets[name]
    compiled = target.compile(arch)
    assert target.gate is not None
    assert amdgcn.check_gate(amdgcn.isa_report(compiled), target.gate) == []
    result = amdgcn.emulate_target(target, arch, seed=seed, compiled=compiled)
    assert result.passed, result.failures
    assert result.report.unlanded == 0, "every transfer is waited for before the work-group ends"


def product(room: Room, a: object, b: object, y: torch.Tensor, tile: object = None, **fields: object) -> torch.Tensor:
    return room.run(room.gemm.gemm_call(a, b, y, cus=2, tile=tile or room.small, **fields))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 130, 65), (129, 2, 127)], ids=str)
@pytest.mark.parametrize("k_inner", [(True, True), (False, True), (False, False)], ids=["NT", "TT", "TN"])
def test_odd_sizes(
    room: Room, sizes: tuple[int, int, int], k_inner: tuple[bool, bool], numbers: np.random.Generator
) -> None:
    """Rows that are no whole transfers, contractions shorter than a tile, one row, one column."""
    rows, cols, depth = sizes
    a, b = plain(numbers, rows, depth, k_inner[0]), plain(numbers, cols, depth, k_inner[1])
    y = product(room, a, b, torch.full((rows, cols), float("nan")))
    np.testing.assert_allclose(y.double(), values(a) @ values(b).T, atol=2.0**-18 * max(depth, 16), rtol=0)


def test_views_into_larger_tensors_and_outputs_with_a_pitch(room: Room, numbers: np.random.Generator) -> None:
    """Rows further apart than they are long, and neighbours that must stay as they are."""
    a = plain(numbers, 140, 208, True)[3:133, 8:144]
    b = plain(numbers, 152, 140, False)[8:143, 2:138]
    whole = torch.full((134, 150), 7.0, dtype=torch.bfloat16)
    y = product(room, a, b, whole[2:132, 8:143])
    want = values(a) @ values(b).T
    np.testing.assert_allclose(y.double(), want, atol=2.0**-8 * np.abs(want).max(), rtol=0)
    whole[2:132, 8:143] = 7.0
    assert bool((whole == 7.0).all())


@pytest.mark.parametrize("layout", ["plain", "gfx950"])
def test_a_nan_scale_stays_visible_in_its_row_and_nowhere_else(
    room: Room, layout: str, numbers: np.random.Generator
) -> None:
    a, b = quantized(numbers, 130, 288, MXFP4), quantized(numbers, 40, 288, MXFP4)
    a.block_scale[129, 8] = 0xFF
    want = values(a)[:129] @ values(b).T
    y = product(room, a.with_scale_layout(layout), b.with_scale_layout(layout), torch.empty(130, 40), room.small4)
    assert bool(y[129].isnan().all())
    np.testing.assert_allclose(y[:129].double(), want, atol=2.0**-18 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("bad", [1, 3], ids=["second", "fourth"])
@pytest.mark.parametrize("spec", [MXFP4, MXFP8], ids=str)
def test_scales_of_one_expert_do_not_touch_the_others(
    room: Room, spec: QuantSpec, bad: int, numbers: np.random.Generator
) -> None:
    """Stretches of the contraction shorter and longer than a tile that start anywhere; scales are loaded by whole words."""
    ends = [0, 32, 96, 480, 544, 864]
    a, b = quantized(numbers, 40, 864, spec), quantized(numbers, 48, 864, spec)
    a.block_scale[:, ends[bad] // 32 : ends[bad + 1] // 32] = 0xFF
    out = torch.full((5, 40, 48), float("nan"))
    tile = room.small4 if spec is MXFP4 else room.small8
    room.run(room.gemm.depth_call(a, b, torch.tensor(ends), out, accumulate=False, cus=2, tile=tile))
    want = np.stack([values(a)[:, s:e] @ values(b)[:, s:e].T for s, e in itertools.pairwise(ends)])
    assert bool(out[bad].isnan().all())
    others = [group for group in range(5) if group != bad]
    np.testing.assert_allclose(out[others].double(), want[others], atol=2.0**-18 * np.abs(want[others]).max(), rtol=0)


def test_sums_that_are_exact_in_fp32_give_the_same_bits(room: Room, numbers: np.random.Generator) -> None:
    """Small integers: any order of additions gives the same result, so nothing may differ at all."""
    a, b = (torch.from_numpy(numbers.integers(-8, 9, (rows, 328))).bfloat16() for rows in (140, 130))
    y = product(room, a, b, torch.empty(140, 130))
    assert torch.equal(y.double(), a.double() @ b.double().T)


# -- mutants of gates ---------------------------------------------------------------------------------------------------
_GLOBAL = "global_load_dwordx4 v[0:3], v[0:1], off"
_MUTANTS = [
    ("gfx950", "gfx950_bf16_nt", r"buffer_load_dwordx4 (.*) lds", _GLOBAL, "global_load_dwordx4"),
    ("gfx950", "gfx950_bf16_nt", r"buffer_load_dwordx4 (v\d+), (.*) lds", r"buffer_load_dword \1, \2 lds", "dword lds x1"),
    ("gfx950", "gfx950_bf16_nt", r"buffer_load_dwordx4 (v\d+), (.*) lds", r"buffer_load_dwordx4 v[0:3], \1, \2", "dwordx4 x1"),
    ("gfx950", "gfx950_bf16_nt", r"buffer_load_dwordx4 (v\d+), (.*) lds", r"buffer_load_dword v0, \1, \2", "most 0"),
    ("gfx950", "gfx950_bf16_nt", r"ds_read_b128 v\[(\d+):\d+\]", r"ds_read_u16 v\1", "ds_read_u16"),
    ("gfx950", "gfx950_bf16_nt", r"s_barrier\b", "ds_write_b128 v0, v[0:3]", "ds_write_b128"),
    ("gfx950", "gfx950_bf16_nt", r"s_barrier\b", "scratch_load_dword v0, off, s0", "scratch_load_dword"),
    ("gfx950", "gfx950_mxfp4_even", r"buffer_load_dword v", "buffer_load_ubyte v", "buffer_load_ubyte"),
    ("gfx950", "gfx950_mxfp4_even", r"s_barrier\b", "buffer_load_dword v0, v0, s[0:3], 0 offen", "29 instructions"),
    ("gfx1250", "gfx1250_bf16_nt", r"s_barrier_wait.*", "global_load_b128 v[0:3], v[0:1], off", "global_load_b128"),
    ("gfx1250", "gfx1250_bf16_nt", r"s_barrier_wait.*", "buffer_load_b128 v[0:3], v0, s[0:3], null offen", "buffer_load_b128"),
    ("gfx1250", "gfx1250_bf16_nt", r"s_barrier_wait.*", "ds_load_u16 v0, v0", "ds_load_u16"),
    ("gfx1250", "gfx1250_bf16_nt", r"s_barrier_wait.*", "scratch_load_b32 v0, off, s0", "scratch_load_b32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "name", "pattern", "replacement", "found"), _MUTANTS, ids=[item[-1] for item in _MUTANTS]
)
def test_a_gate_notices_one_wrong_instruction_in_the_loop(
    arch: str, name: str, pattern: str, replacement: str, found: str
) -> None:
    room = ROOMS[arch]
    code = room.targets[name].compile(arch)
    start = code.asm.index(f"\n{amdgcn.isa_report(code).loop.label}:")
    head, loop = code.asm[:start], code.asm[start:]
    text, count = re.subn(pattern, replacement, loop, count=1)
    assert count, f"the loop has nothing like {pattern!r}"
    problems = amdgcn.check_gate(amdgcn.isa_report(code.with_assembly(head + text)), room.targets[name].gate)
    assert any(found in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("arch", "name", "pattern", "replacement", "lacking"),
    [
        ("gfx950", "gfx950_bf16_nn", "ds_read_b64_tr_b16", "ds_read_b64", "ds_read_b64_tr_b16"),
        ("gfx950", "gfx950_mxfp4_even", "v_mfma_scale_f32_32x32x64_f8f6f4", "v_mfma_f32_32x32x64_f8f6f4", "v_mfma_scale"),
        ("gfx950", "gfx950_bf16_nt", r"(buffer_load_dwordx4 .*) lds", r"\1", "buffer_load_dwordx4 lds"),
        ("gfx1250", "gfx1250_bf16_tn", "ds_load_tr16_b128", "ds_load_b128", "ds_load_tr16_b128"),
        ("gfx1250", "gfx1250_mxfp4", "v_wmma_scale_f32_32x16x128_f4", "v_wmma_scale_f32_16x16x128_f8f6f4", "32x16x128_f4"),
        ("gfx1250", "gfx1250_bf16_nt", "tensor_load_to_lds.*", "s_nop 0", "tensor_load_to_lds"),
        ("gfx1250", "gfx1250_bf16_nt", "tensor_store_from_lds.*", "s_nop 0", "tensor_store_from_lds"),
    ],
)  # fmt: skip
def test_a_gate_notices_what_is_lacking(arch: str, name: str, pattern: str, replacement: str, lacking: str) -> None:
    room = ROOMS[arch]
    report = amdgcn.isa_report(room.mutated(name, pattern, replacement))
    problems = amdgcn.check_gate(report, room.targets[name].gate)
    assert any("lacks" in problem and lacking in problem for problem in problems), problems


def test_the_gates_of_scaled_products_count_their_loads() -> None:
    """A piece's scales take two 32-bit loads a tile, those of plain FP8 one."""
    for name, target in GFX950.targets.items():
        plan = target.constants["P"]
        assert target.gate is not None
        if "without" in name:
            continue
        pieces = (plan.BM // plan.HM, plan.BN // plan.HN)
        each = [2 if shuffled or plan.A == "e2m1" else 1 for shuffled in (plan.A_SHUFFLED, plan.B_SHUFFLED)]
        most = 2 * sum(count * loads for count, loads in zip(pieces, each)) if plan.MX else 0
        assert dict(target.gate.limits) == {"buffer_load_dword": most}, name
