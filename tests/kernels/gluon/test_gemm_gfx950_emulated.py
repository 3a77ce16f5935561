"""What is particular to the emulated gfx950 GEMMs: MCA floors, bank conflicts, copies of operands, and mutants of the code.

Nothing here was measured or has run on hardware; test_gemm_emulated.py compares every target with float64. The mutants
show that a missing wait, barrier, lane map or bound would be
noticed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

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
from primus_turbo_plugin.kernels.gluon.gemm_targets import plain, quantized, values
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.kernels.gluon.emulated import GFX950

ARCH = "gfx950"
TARGETS = GFX950.targets
WITH_FLOOR = [name for name, target in TARGETS.items() if target.gate is not None and target.gate.min_mca_share]
SMALL = GFX950.small


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


def test_one_operand_along_k_the_other_along_its_rows_and_a_depth_that_is_no_transfer(
    numbers: np.random.Generator,
) -> None:
    a, b = plain(numbers, 40, 75, True), plain(numbers, 72, 75, False)
    y = torch.full((40, 72), float("nan"))
    GFX950.run(gemm_gfx950.gemm_call(a, b, y, cus=4, tile=SMALL))
    np.testing.assert_allclose(y.double(), values(a) @ values(b).T, atol=2.0**-12, rtol=0)


@pytest.mark.parametrize("sizes", [(100, 7), (9, 130)], ids=str)
def test_wgrad_of_experts_whose_rows_are_no_whole_transfers(
    sizes: tuple[int, int], numbers: np.random.Generator
) -> None:
    """Operands contiguous along their rows are read by whole vectors, the last of which reaches past the rows."""
    offsets = torch.tensor([0, 70, 70, 169, 170])
    a, b = (plain(numbers, rows, 170, False) for rows in sizes)
    out = torch.full((4, *sizes), float("nan"))
    GFX950.run(gemm_gfx950.depth_call(a, b, offsets, out, accumulate=False, cus=1, tile=SMALL))
    want = np.stack([values(a)[:, s:e] @ values(b)[:, s:e].T for s, e in itertools.pairwise(offsets.tolist())])
    np.testing.assert_allclose(out.double(), want, atol=2.0**-12, rtol=0)


def test_every_tile_of_many_is_computed_once(numbers: np.random.Generator) -> None:
    """25 tiles dealt to 8 dies, in groups of rows of which the last is smaller; accumulated into, so that twice would show."""
    a, b = plain(numbers, 520, 64, True), plain(numbers, 560, 64, True)
    y = torch.ones(520, 560)
    GFX950.run(gemm_gfx950.gemm_call(a, b, y, accumulate=True, cus=4, tile=SMALL))
    np.testing.assert_allclose(y.double(), values(a) @ values(b).T + 1, atol=2.0**-12, rtol=0)


@pytest.mark.parametrize("depth", [75, 128], ids=str)
def test_fp8_of_any_depth(depth: int, numbers: np.random.Generator) -> None:
    """Codes whose rows are no whole transfers are copied with zeros behind them."""
    spec = QuantSpec(format=Format.FP8, block="rowwise")
    a, b = quantized(numbers, 40, depth, spec), quantized(numbers, 72, depth, spec)
    y = torch.full((40, 72), float("nan"))
    GFX950.run(gemm_gfx950.gemm_call(a, b, y, cus=4, tile=GFX950.small8))
    want = values(a)[:, :depth] @ values(b)[:, :depth].T
    np.testing.assert_allclose(y.double(), want, atol=2.0**-18 * np.abs(want).max(), rtol=0)


def test_aligned_operands_are_read_where_they_are_and_others_are_copied(numbers: np.random.Generator) -> None:
    y = torch.empty(40, 40)
    aligned = gemm_gfx950.gemm_call(plain(numbers, 40, 64, True), plain(numbers, 40, 64, False), y, cus=1)
    assert (aligned.constants["P"].A_K, aligned.constants["P"].B_K) == (True, False)
    shifted = plain(numbers, 40, 72, True)[:, 3:67]
    call = gemm_gfx950.gemm_call(shifted, shifted, y, cus=1)
    assert call.args["a_ptr"].data_ptr() != shifted.data_ptr()
    assert call.args["a_ptr"].data_ptr() % 16 == 0


# -- mutants ------------------------------------------------------------------------------------------------------------
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
        amdgcn.emulate_target(TARGETS[name], ARCH, seed=seed, compiled=GFX950.mutated(name, pattern, replacement))


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
    result = amdgcn.emulate_target(TARGETS[name], ARCH, seed=seed, compiled=GFX950.mutated(name, pattern, replacement))
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
