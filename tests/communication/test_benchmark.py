"""scripts/measure_multi_gpu.sh on CPU processes: every benchmark of it runs, checks itself and is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import _tp_layer, multi_gpu_report, tp_overlap, weak_scaling
from primus_turbo_plugin.communication.overlap import Overlap

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "measure_multi_gpu.sh"


def _run(folder: Path | str, *, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "TURBO_DRY_RUN": "1", **variables}
    return subprocess.run(
        [SCRIPT, folder], env=environment, capture_output=True, text=True, timeout=280, check=False, cwd=cwd or folder
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


@pytest.mark.parametrize("given", ["1", "65", "two"])
def test_a_number_of_ranks_that_cannot_be_is_an_error_and_leaves_the_folder_alone(tmp_path: Path, given: str) -> None:
    done = _run(tmp_path / "new", TURBO_RANKS=given, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr == f"error: TURBO_RANKS={given}: must be a number from 2 to 64.\n"
    assert not (tmp_path / "new").exists()


def test_the_script_explains_itself_and_takes_no_option_for_a_folder(tmp_path: Path) -> None:
    helped = _run("--help", cwd=tmp_path)
    assert helped.returncode == 0
    assert helped.stdout.startswith("Everything that needs several GPUs")
    assert "TURBO_DRY_RUN    1: tiny sizes on CPU processes" in helped.stdout
    assert "#" not in helped.stdout
    refused = _run("--ranks", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: --ranks: there are no options; a folder and variables, see --help.\n"
    assert not list(tmp_path.iterdir())


def test_a_job_that_takes_too_long_takes_its_ranks_along(tmp_path: Path) -> None:
    """As torchrun: its ranks are in sessions of their own, and it ends them where it is asked to end, not where it is killed."""
    rank_file = tmp_path / "rank"
    job = tmp_path / "job.py"
    job.write_text(
        f"""
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (rank.send_signal(signal.SIGKILL), sys.exit(9)))
open({str(rank_file)!r}, "w").write(str(rank.pid))
rank.wait()
"""
    )
    assert weak_scaling.run_for([sys.executable, str(job)], 3.0) == 9
    state = Path(f"/proc/{rank_file.read_text()}/stat")
    assert not state.exists() or state.read_text().split(") ")[1].startswith("Z"), "the rank lives on"
    assert weak_scaling.run_for([sys.executable, "-c", "raise SystemExit(4)"], 60.0) == 4


def test_graphs_are_captured_of_an_overlap_of_their_own() -> None:
    """Eager calls of one that has been captured begin with a handshake, which the rows after it would show as time of theirs."""

    class Sdma:
        capabilities = SimpleNamespace(name="sdma")
        world_size, rank, device = 4, 0, torch.device("cpu")

    seen: list[Any] = []
    overlap = Overlap(Sdma())  # type: ignore[arg-type]
    found = _tp_layer.variants_of(lambda use: seen.append(use) or [], overlap)  # type: ignore[func-returns-value]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tp_layer, "captured", lambda step: step)
        for make in found.values():
            make()()
    *eager, captured = [None if use is None else use.overlap for use in seen]
    assert list(found)[-1] == "overlap on, captured"
    assert eager == [None, overlap, overlap]
    assert captured not in (None, overlap)

    ranks = SimpleNamespace(device=torch.device("cpu"), size=4)
    bench = tp_overlap.Bench(ranks, Sdma(), 1, torch.float32, None)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tp_overlap.Bench, "_captured", staticmethod(lambda run: run))
        ours = {v.name: v.run for v in bench._chunked(lambda of, i, out: of, merge=True)}  # type: ignore[arg-type, return-value]
    used = {name: run(0, None) for name, run in ours.items()}
    assert {name for name, of in used.items() if of is not bench.overlap} == {"ours, captured"}
    assert used["ours, captured"] is bench.in_graphs
    assert [of._lanes() for of in bench.ways.values()] == [3, 1]


@pytest.mark.slow
def test_a_run_out_of_time_reports_what_there_is_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("tp.jsonl", "tp.txt", "report.md"):
        (folder / name).write_text("of a run before")
    done = _run("out", cwd=tmp_path, TURBO_SECONDS="1")  # a folder is meant as the caller means it
    assert done.returncode == 1, done.stdout + done.stderr
    for step in ("tp", "cp", "weak"):
        assert f"== {step}: no time left" in done.stdout
    assert {path.name for path in folder.iterdir()} == {"machine.txt", "report.md"}
    assert "of a run before" not in (folder / "report.md").read_text()


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
        _row("AG+GEMM", shape, "ours alone, peers in turn", 0.2),
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
    assert "min_gemm_ms=0.80," in text
    assert "do not tell chunk_us, memory_gb_s, wave_outputs, which" in text
    assert multi_gpu_report.report(tmp_path / "nowhere") == "nothing has been measured"


def test_what_links_and_small_gemms_are_worth_is_told_from_what_was_measured() -> None:
    """`ours alone` is as the device's costs say, and without costs it is a lane a peer: it tells nothing about a switch."""

    def shape(n: int, gemm: float, **others: float) -> list[dict[str, Any]]:
        times = {"GEMM alone": gemm, **{name.replace("_", " "): ms for name, ms in others.items()}}
        return [_row("AG+GEMM", f"8192x4096x{n}", name, ms) for name, ms in times.items()]

    def costs(*rows: list[dict[str, Any]], at_once: float = 0.3, one_by_one: float = 0.2) -> str:
        lanes = {
            "ours alone": 0.1,
            "ours alone, all peers at once": at_once,
            "ours alone, peers in turn": one_by_one,
        }
        alone = [_row("AG+GEMM", "8192x4096x64", name, ms) for name, ms in lanes.items()]
        return multi_gpu_report.costs([row for of in (*rows, alone) for row in of], 8)

    library = "NCCL, then GEMM"
    small, middle, large = (
        shape(64, 0.1, ours=0.5, **{library: 0.4}),
        shape(128, 0.4, ours=0.5, **{library: 0.6}),
        shape(256, 0.9, ours=1.2, **{library: 1.3}),
    )
    assert "switched=True," in costs(large)
    assert "switched=False," in costs(large, at_once=0.15)
    assert "min_gemm_ms=0.40," in costs(small, middle, large)
    assert "min_gemm_ms" not in costs(shape(64, 0.1, ours=0.5)).split("```python")[1]  # no library to compare with
    lost = costs(small)
    assert "min_gemm_ms=" not in lost
    assert "# min_gemm_ms: nothing was won with GEMMs of up to 0.10 ms" in lost
