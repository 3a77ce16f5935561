"""The ablation benchmark without a GPU: what it prints is an estimate, says so, and shows the feature that was switched off."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from benchmarks import data_movement
from primus_turbo_plugin.kernels.gluon import gemm_gfx950, gemm_gfx950_plan, gemm_gfx1250
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250 import Ablation
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_plan import tiles_for

if (reason := gemm_gfx1250.triton_refusal()) is not None:
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product a feature, in a tile that compiles fast."""
    tile = tiles_for("bf16", "bf16")[1]

    def call(a, b, y, programs, ablation):
        return gemm_gfx1250.gemm_call(a, b, y, cus=programs, tile=tile, ablation=ablation)

    features = (
        dataclasses.replace(data_movement.TDM, layouts=(("NT", True, True),)),
        dataclasses.replace(data_movement.TRANSPOSE_LOAD, layouts=(("TN", False, False),)),
    )
    monkeypatch.setattr(data_movement, "ARCHS", {"gfx1250": (call, features)})
    monkeypatch.setattr(data_movement, "_STATIC_SIZE", 512)


def test_static_rows_show_what_replaces_the_feature(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    assert data_movement.main(["--static", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Static estimate" in printed
    assert "1.88x" in printed
    assert "1.19x" in printed
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"static estimate"}
    with_tdm, without_tdm, with_transpose, without_transpose = rows
    assert (with_tdm["tensor_transfers"], with_tdm["copies"]) == (2, 0)
    assert (without_tdm["tensor_transfers"], without_tdm["copies"]) == (0, 16)
    assert with_tdm["mma_clocks"] == without_tdm["mma_clocks"]
    assert without_tdm["lds_clocks"] > with_tdm["lds_clocks"]
    assert without_transpose["lds_instructions"] > 2 * with_transpose["lds_instructions"]
    assert without_transpose["barriers"] > with_transpose["barriers"]


def test_static_rows_of_gfx950_count_its_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(a, b, y, programs, ablation):
        return gemm_gfx950.gemm_call(a, b, y, cus=programs, tile=gemm_gfx950_plan.tiles_for("bf16")[-1])

    feature = dataclasses.replace(data_movement.TRANSPOSE_LOAD, layouts=(("NN", True, False),), off=Ablation())
    monkeypatch.setattr(data_movement, "ARCHS", {"gfx950": (call, (feature,))})
    monkeypatch.setattr(data_movement, "_STATIC_SIZE", 512)
    assert [row.barriers for row in data_movement.static_rows("gfx950")] == [2, 2], "one a tile, two tiles an iteration"


def test_without_such_a_gpu_it_says_so_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data_movement, "_this_arch", lambda: "sm_90")
    assert data_movement.main([]) == 1
    message = capsys.readouterr().err
    assert "found sm_90" in message
    assert "--static" in message
