"""LLVM MCA on hot loops: what is handed to it, and the simulation itself where the library is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from primus_turbo_plugin.amdgcn.report.gate import IsaGate, check_gate
from primus_turbo_plugin.amdgcn.report.isa import isa_report
from primus_turbo_plugin.amdgcn.report.loops import hot_loop
from primus_turbo_plugin.amdgcn.report.mca import McaResult, find_llvm, loop_text, run_mca
from primus_turbo_plugin.amdgcn.report.render import render, to_json
from primus_turbo_plugin.errors import UnsupportedError
from tests.amdgcn.single import kernel

installed = importlib.util.find_spec("mlc_llvm_static") is not None

MFMA_BOUND = "\n".join(
    [".L1:"]
    + [
        f"v_mfma_f32_16x16x32_bf16 v[{16 * i}:{16 * i + 3}], v[128:131], v[132:135], v[{16 * i}:{16 * i + 3}]"
        for i in range(8)
    ]
    + ["s_cbranch_scc1 .L1"]
)


def test_transfers_to_lds_are_shown_as_register_loads_and_branches_left_out() -> None:
    text = """
        .L1:
        buffer_load_dwordx4 v7, s[8:11], 0 offen offset:16 lds
        global_load_lds_dword v[2:3], off
        ds_read_b128 v[0:3], v4
        s_cbranch_scc1 .L1
    """
    loop = hot_loop(kernel("gfx950", text).program)
    assert loop is not None
    assert loop_text(loop).splitlines() == [
        "buffer_load_dwordx4 v[252:255], v7, s[8:11], 0 offen offset:16",
        "global_load_dword v255, v[2:3], off",
        "ds_read_b128 v[0:3], v4",
    ]


def test_gfx1250_and_straight_code_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="gfx942 and gfx950 only, got gfx1250"):
        run_mca(kernel("gfx1250", ".L1:\ns_nop 0\ns_cbranch_scc1 .L1"))
    with pytest.raises(UnsupportedError, match="has no loop"):
        run_mca(kernel("gfx950", "s_nop 0"))


@pytest.mark.skipif(installed, reason="mlc-llvm-static is installed")
def test_a_missing_library_is_named() -> None:
    with pytest.raises(UnsupportedError, match="mlc-llvm-static and mlc-llvm-static-extra-targets"):
        find_llvm()


@pytest.mark.skipif(not installed, reason="mlc-llvm-static is not installed: MCA cannot be built")
@pytest.mark.slow
def test_independent_matrix_instructions_keep_the_unit_busy(tmp_path: Path) -> None:
    """Eight independent MFMAs of four passes each: 128 clocks, and nothing in between."""
    result = run_mca(kernel("gfx950", MFMA_BOUND), tmp_path)
    assert result.matrix_clocks == 8 * 16
    assert result.matrix_share > 0.95
    assert result.skipped == 0
    dependent = MFMA_BOUND.replace("v[128:131]", "v[112:115]")  # A is the last instruction's result
    assert run_mca(kernel("gfx950", dependent), tmp_path).matrix_share < result.matrix_share


def test_gates_and_reports_use_the_simulated_share() -> None:
    report = isa_report(kernel("gfx950", MFMA_BOUND, waves=4))
    gate = IsaGate(min_mca_share=0.9)
    assert check_gate(report, gate) == [], "not run, not checked"
    simulated = dataclasses.replace(report, mca=McaResult(200.0, 128.0, 8, 0, {}))
    assert "matrix unit busy 64.0%, at least 90.0% required" in check_gate(simulated, gate)[0]
    assert "LLVM MCA" in render(simulated)
    assert to_json(simulated)["mca"]["matrix_share"] == pytest.approx(0.64)
