"""The gfx950 GEMMs compiled, emulated against float64 with deferred transfers and race checks on, held to ISA gates.

Nothing here was measured or has run on hardware. The mutants show that a missing wait, barrier, lane map or bound would be
noticed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
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
from primus_turbo_plugin.amdgcn.emulator.lds import LocalMemory
from primus_turbo_plugin.amdgcn.faults import EmulationError, OutOfBoundsError, RaceError
from primus_turbo_plugin.amdgcn.report.loops import hot_loop
from primus_turbo_plugin.amdgcn.report.mca import run_mca
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_plan import tiles_for
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_targets import isa_targets
from primus_turbo_plugin.kernels.gluon.gemm_targets import plain, quantized, values
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.support import seeds

ARCH = "gfx950"
TARGETS = {target.name: target for target in isa_targets()}
WITH_FLOOR = [name for name, target in TARGETS.items() if target.gate is not None and target.gate.min_mca_share]
SMALL = tiles_for("bf16")[-1]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return seeds.case_seed(request.node.nodeid)


@pytest.fixture
def numbers(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_the_emulated_kernel_agrees_with_float64_and_its_code_passes_the_gate(name: str, seed: int) -> None:
    target = TARGETS[name]
    compiled = target.compile(ARCH)
    assert target.gate is not None
    assert amdgcn.check_gate(amdgcn.isa_report(compiled), target.gate) == []
    result = amdgcn.emulate_target(target, ARCH, seed=seed, compiled=compiled)
    assert result.passed, result.failures
    assert result.report.unlanded == 0, "every transfer is waited for before the work-group ends"


@pytest.mark.skipif(
    importlib.util.find_spec("mlc_llvm_static") is None, reason="mlc-llvm-static is not installed: MCA cannot be built"
)
@pytest.mark.parametrize("name", WITH_FLOOR)
def test_the_simulated_loop_keeps_the_matrix_unit_busy(name: str) -> None:
    compiled = TARGETS[name].compile(ARCH)
    report = dataclasses.replace(amdgcn.isa_report(compiled), mca=run_mca(compiled))
    assert TARGETS[name].gate is not None
    assert amdgcn.check_gate(report, TARGETS[name].gate) == []


@pytest.mark.parametrize("name", ["gfx950_bf16_nt_small", "gfx950_bf16_experts_wgrad", "gfx950_mxfp4_fp32"])
def test_operand_reads_of_the_loop_have_no_bank_conflicts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 banks of 4 bytes: what the lanes of one pass (16 of 16 bytes, 32 of 8) read lies in different ones."""
    compiled = TARGETS[name].compile(ARCH)
    loop = hot_loop(compiled.program)
    assert loop is not None
    in_loop = {id(instruction) for instruction in loop.instructions}
    worst: dict[int, int] = {}
    read = LocalMemory.read

    def watched(lds: LocalMemory, pc: int, addresses: np.ndarray, width: int) -> np.ndarray:
        if id(compiled.program.instructions[pc]) in in_loop:
            words = np.asarray(addresses)[..., None] // 4 + np.arange(width // 4)
            passes = (words % 64).reshape(-1, 64)  # 256 bytes a pass
            worst[width] = max(worst.get(width, 0), *(int(np.bincount(banks).max()) for banks in passes))
        return read(lds, pc, addresses, width)

    monkeypatch.setattr(LocalMemory, "read", watched)
    amdgcn.emulate_target(TARGETS[name], ARCH, compiled=compiled)
    assert worst, "the loop reads operands"
    assert set(worst.values()) == {1}, worst


def run(call: gemm_gfx950.KernelCall) -> torch.Tensor:
    """Emulates a call."""
    compiled = amdgcn.compile(call.kernel, ARCH, call.args, call.constants, **call.options)
    amdgcn.launch(compiled, call.grid, call.args)
    return call.args["c_ptr"]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 130, 65), (129, 2, 127)], ids=str)
@pytest.mark.parametrize("k_inner", [(True, True), (False, True), (False, False)], ids=["NT", "TT", "TN"])
def test_odd_sizes(sizes: tuple[int, int, int], k_inner: tuple[bool, bool], numbers: np.random.Generator) -> None:
    """Rows that are no whole transfers, contractions shorter than a tile, one row, one column."""
    rows, cols, depth = sizes
    a, b = plain(numbers, rows, depth, k_inner[0]), plain(numbers, cols, depth, k_inner[1])
    y = torch.full((rows, cols), float("nan"))
    run(gemm_gfx950.gemm_call(a, b, y, cus=4, tile=SMALL))
    np.testing.assert_allclose(y.double(), values(a) @ values(b).T, atol=2.0**-18 * max(depth, 16), rtol=0)


def test_one_operand_along_k_the_other_along_its_rows_and_a_depth_that_is_no_transfer(
    numbers: np.random.Generator,
) -> None:
    a, b = plain(numbers, 40, 75, True), plain(numbers, 72, 75, False)
    y = torch.full((40, 72), float("nan"))
    run(gemm_gfx950.gemm_call(a, b, y, cus=4, tile=SMALL))
    np.testing.assert_allclose(y.double(), values(a) @ values(b).T, atol=2.0**-12, rtol=0)


@pytest.mark.parametrize("sizes", [(100, 7), (9, 130)], ids=str)
def test_wgrad_of_experts_whose_rows_are_no_whole_transfers(
    sizes: tuple[int, int], numbers: np.random.Generator
) -> None:
    """Operands contiguous along their rows are read by whole vectors, the last of which reaches past the rows."""
    offsets = torch.tensor([0, 70, 70, 169, 170])
    a, b = (plain(numbers, rows, 170, False) for rows in sizes)
    out = torch.full((4, *sizes), float("nan"))
    run(gemm_gfx950.depth_call(a, b, offsets, out, accumulate=False, cus=1, tile=SMALL))
    want = np.stack([values(a)[:, s:e] @ values(b)[:, s:e].T for s, e in itertools.pairwise(offsets.tolist())])
    np.testing.assert_allclose(out.double(), want, atol=2.0**-12, rtol=0)


def test_every_tile_of_many_is_computed_once(numbers: np.random.Generator) -> None:
    """25 tiles dealt to 8 dies, in groups of rows of which the last is smaller; accumulated into, so that twice would show."""
    a, b = plain(numbers, 520, 64, True), plain(numbers, 560, 64, True)
    y = torch.ones(520, 560)
    run(gemm_gfx950.gemm_call(a, b, y, accumulate=True, cus=4, tile=SMALL))
    np.testing.assert_allclose(y.double(), values(a) @ values(b).T + 1, atol=2.0**-12, rtol=0)


@pytest.mark.parametrize("depth", [75, 128], ids=str)
def test_fp8_of_any_depth(depth: int, numbers: np.random.Generator) -> None:
    """Codes whose rows are no whole transfers are copied with zeros behind them."""
    spec = QuantSpec(format=Format.FP8, block="rowwise")
    a, b = quantized(numbers, 40, depth, spec), quantized(numbers, 72, depth, spec)
    y = torch.full((40, 72), float("nan"))
    run(gemm_gfx950.gemm_call(a, b, y, cus=4, tile=tiles_for("e4m3")[-1]))
    want = values(a)[:, :depth] @ values(b)[:, :depth].T
    np.testing.assert_allclose(y.double(), want, atol=2.0**-18 * np.abs(want).max(), rtol=0)


def test_views_into_larger_tensors_and_outputs_with_a_pitch(numbers: np.random.Generator) -> None:
    """Rows further apart than they are long, and neighbours that must stay as they are."""
    a = plain(numbers, 140, 208, True)[3:133, 8:144]
    b = plain(numbers, 152, 140, False)[8:144, 2:138]
    whole = torch.full((134, 150), 7.0, dtype=torch.bfloat16)
    y = whole[2:132, 8:144]
    run(gemm_gfx950.gemm_call(a, b, y, cus=2, tile=SMALL))
    want = values(a) @ values(b).T
    np.testing.assert_allclose(y.double(), want, atol=2.0**-8 * np.abs(want).max(), rtol=0)
    whole[2:132, 8:144] = 7.0
    assert bool((whole == 7.0).all())


def test_aligned_operands_are_read_where_they_are_and_others_are_copied(numbers: np.random.Generator) -> None:
    y = torch.empty(40, 40)
    aligned = gemm_gfx950.gemm_call(plain(numbers, 40, 64, True), plain(numbers, 40, 64, False), y, cus=1)
    assert (aligned.constants["P"].A_K, aligned.constants["P"].B_K) == (True, False)
    shifted = plain(numbers, 40, 72, True)[:, 3:67]
    call = gemm_gfx950.gemm_call(shifted, shifted, y, cus=1)
    assert call.args["a_ptr"].data_ptr() != shifted.data_ptr()
    assert call.args["a_ptr"].data_ptr() % 16 == 0


@pytest.mark.parametrize("shuffled", [False, True], ids=["plain", "gfx950"])
def test_a_nan_scale_stays_visible_in_its_row_and_nowhere_else(shuffled: bool, numbers: np.random.Generator) -> None:
    spec = QuantSpec(format=Format.MXFP4)
    a, b = quantized(numbers, 130, 288, spec), quantized(numbers, 40, 288, spec)
    a.block_scale[129, 8] = 0xFF
    want = values(a)[:129] @ values(b).T
    y = torch.empty(130, 40)
    if shuffled:
        a, b = a.with_scale_layout("gfx950"), b.with_scale_layout("gfx950")
    run(gemm_gfx950.gemm_call(a, b, y, cus=1, tile=tiles_for("e2m1")[-1]))
    assert bool(y[129].isnan().all())
    np.testing.assert_allclose(y[:129].double(), want, atol=2.0**-18 * np.abs(want).max(), rtol=0)


def test_sums_that_are_exact_in_fp32_give_the_same_bits(numbers: np.random.Generator) -> None:
    """Small integers: any order of additions gives the same result, so nothing may differ at all."""
    a, b = (torch.from_numpy(numbers.integers(-8, 9, (rows, 328))).bfloat16() for rows in (140, 130))
    y = torch.empty(140, 130)
    run(gemm_gfx950.gemm_call(a, b, y, cus=2, tile=SMALL))
    assert torch.equal(y.double(), a.double() @ b.double().T)


# -- mutants ------------------------------------------------------------------------------------------------------------
def mutated(name: str, pattern: str, replacement: str) -> amdgcn.CompiledKernel:
    """A target's code with every match replaced; there must be one."""
    compiled = TARGETS[name].compile(ARCH)
    text, count = re.subn(pattern, replacement, compiled.asm)
    assert count, f"the code has nothing like {pattern!r}"
    return compiled.with_assembly(text)


@pytest.mark.parametrize(
    ("name", "pattern", "replacement"),
    [
        ("gfx950_bf16_nt_small", r"s_waitcnt vmcnt\(0\) lgkmcnt\(0\)", "s_waitcnt lgkmcnt(0)"),
        ("gfx950_bf16_nt_small", r"s_barrier\b", "s_nop 0"),
    ],
    ids=["wait", "barrier"],
)
def test_a_removed_wait_or_barrier_is_noticed(name: str, pattern: str, replacement: str, seed: int) -> None:
    with pytest.raises(RaceError):
        amdgcn.emulate_target(TARGETS[name], ARCH, seed=seed, compiled=mutated(name, pattern, replacement))


@pytest.mark.parametrize(
    ("name", "pattern", "replacement"),
    [
        ("gfx950_bf16_experts_dgrad", r"ds_read_b64_tr_b16", "ds_read_b64"),
        ("gfx950_mxfp4_fp32", r"op_sel:\[1,", "op_sel:[0,"),
        ("gfx950_mxfp4_fp32", r"v_perm_b32 (v\d+), (v\d+), (v\d+), (s\d+|v\d+)", r"v_mov_b32 \1, \2"),
    ],
    ids=["no transposition", "other row's scale", "scales not rearranged"],
)
def test_a_wrong_lane_map_is_noticed(name: str, pattern: str, replacement: str, seed: int) -> None:
    result = amdgcn.emulate_target(TARGETS[name], ARCH, seed=seed, compiled=mutated(name, pattern, replacement))
    assert not result.passed


@pytest.mark.parametrize(("size", "change"), [("K", -8), ("K", 8), ("M", -1), ("M", 1), ("N", -1), ("N", 8)])
def test_a_bound_that_is_off_is_noticed(size: str, change: int, seed: int) -> None:
    target = TARGETS["gfx950_bf16_nt_small"]
    compiled = target.compile(ARCH)
    wrong = dataclasses.replace(target, inputs=lambda rng: _changed(target.inputs(rng), size, change))
    try:
        result = amdgcn.emulate_target(wrong, ARCH, seed=seed, compiled=compiled)
    except (OutOfBoundsError, EmulationError):
        return
    assert not result.passed


def _changed(args: dict[str, object], size: str, change: int) -> dict[str, object]:
    value = args[size]
    assert isinstance(value, int)
    return args | {size: value + change}
