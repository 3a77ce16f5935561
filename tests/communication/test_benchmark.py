"""scripts/measure_multi_gpu.sh on CPU processes: every benchmark of it runs, checks itself and is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import multi_gpu_report

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "measure_multi_gpu.sh"


def _run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "TURBO_DRY_RUN": "1", **variables}
    return subprocess.run(
        [SCRIPT, folder], env=environment, capture_output=True, text=True, timeout=280, check=False, cwd=folder
    )


@pytest.mark.slow
def test_the_dry_run_measures_checks_and_reports_everything(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "geometric mean over 9 shapes" in done.stdout
    rows = multi_gpu_report.read(tmp_path / "tp.jsonl")
    assert {row["kind"] for row in rows} == {"AG+GEMM", "GEMM+RS", "bulk AG", "bulk RS", "layer"}
    ours = [row for row in rows if row["variant"].startswith(("ours", "overlap on"))]
    assert len(ours) > 40
    weak = multi_gpu_report.read(tmp_path / "weak.jsonl")
    assert {(row["ranks"], row["variant"]) for row in weak} >= {
        (1, "overlap off"),
        (2, "overlap off"),
        (2, "overlap on"),
    }
    for row in (*ours, *weak):
        assert row["timing"] is not None, row
        assert "WRONG" not in row["ok"], row
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("A dry run on CPU processes: no number below means anything.")
    for part in ("**2 ranks**", "Wrong results: none", "**Ring attention**", "**Weak scaling**", "gemm_tflops="):
        assert part in text
    assert "WRONG" not in text


@pytest.mark.slow
def test_a_run_out_of_time_reports_what_there_is_and_says_so(tmp_path: Path) -> None:
    done = _run(tmp_path, TURBO_SECONDS="1")
    assert done.returncode == 1, done.stdout + done.stderr
    for step in ("tp", "cp", "weak"):
        assert f"== {step}: no time left" in done.stdout
    assert not list(tmp_path.glob("*.jsonl"))


def _row(kind: str, shape: str, variant: str, ms: float, **fields: Any) -> dict[str, Any]:
    timing = {"ms": ms, "p20": ms, "p80": ms, "host_us": fields.pop("host", 100.0)}
    row = {"kind": kind, "shape": shape, "variant": variant, "timing": timing, "ranks": 8, "ok": "err 1e-03"}
    return {**row, "speedup": None, "hidden": None, **fields}


def test_what_was_missed_and_what_costs_should_say_is_worked_out(tmp_path: Path) -> None:
    """On eight ranks: 8192 x 4096 in bf16 brings 58.7 MB to a rank; 0.2 ms are 294 GB/s."""
    shape = "8192x4096x7168"
    rows = [
        _row("AG+GEMM", shape, "GEMM alone", 0.8),
        _row("AG+GEMM", shape, "library's all-gather alone", 0.3),
        _row("AG+GEMM", shape, "ours alone", 0.2),
        _row("AG+GEMM", shape, "ours alone, all peers at once", 0.25),
        _row("AG+GEMM", shape, "NCCL, then GEMM", 1.1),
        _row("AG+GEMM", shape, "torch fused_all_gather_matmul", 0.9, speedup=1.22, hidden=0.7),
        _row("AG+GEMM", shape, "ours", 1.0, speedup=1.1, hidden=0.33),
        _row("AG+GEMM", shape, "ours, captured", 0.9, speedup=1.22, hidden=0.66, host=9.0),
        _row("AG+GEMM", shape, "ours, 1 chunk(s)", 1.0, speedup=1.1, host=380.0),
        _row("AG+GEMM", shape, "ours, 2 chunk(s)", 0.95, speedup=1.16, ok="WRONG, relative error 3e-01"),
    ]
    (tmp_path / "tp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = multi_gpu_report.report(tmp_path)
    assert (
        f"| AG+GEMM | {shape} | 0.800 | 0.300 | 1.22x (0.70) | 1.10x (0.33) | 1.22x (0.66) | 100 / 9 | err 1e-03 |"
        in text
    )
    assert "Geometric mean over 1 shapes: 1.10x" in text
    assert f"Behind torch's fused operators on: AG+GEMM {shape} of 1 compared" in text
    assert f"90% hidden on 0 of 1; not on {shape} 0.33" in text
    assert f"Wrong results: AG+GEMM {shape} ours, 2 chunk(s)" in text
    for line in ("gemm_tflops=601,", "copy_gb_s=294,", "switched=True,", "host_us=5.0,", "split_gemm_ms=0.80,"):
        assert line in text
    assert multi_gpu_report.report(tmp_path / "nowhere") == "nothing has been measured"
