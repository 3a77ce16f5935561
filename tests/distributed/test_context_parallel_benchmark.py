"""The benchmark runs as its docstring says, on a machine without GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import context_parallel

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.context_parallel", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_toy_run_on_the_cpu_checks_itself_and_says_that_it_measures_nothing(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    done = run("--device", "cpu", "--algorithms", "p2p", "--window", "20", "--json", str(rows))
    assert done.returncode == 0, done.stderr
    assert "a toy run, its times say nothing about GPUs" in done.stdout
    forward, backward = (json.loads(line) for line in rows.read_text().splitlines())
    for row in (forward, backward):
        assert row["algorithm"] == "p2p"
        assert row["ok"].endswith("dB")
        assert "WRONG" not in row["ok"]
        assert 0 <= row["hidden"] <= 1
    # 20 keys of one neighbour's chunk, k and v, 2 groups of 16 bf16; home they go in fp32.
    assert forward["message_mib"] * 2**20 == 20 * 2 * 2 * 16 * 2
    assert backward["message_mib"] * 2**20 == 20 * 2 * 2 * 16 * (2 + 4)


def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["context_parallel", "--ranks", "99"])
    with pytest.raises(SystemExit):
        context_parallel.main()
    assert "99 ranks need as many GPUs" in capsys.readouterr().err
