"""benchmarks/tp_overlap.py on CPU processes: that it runs and its checks pass; its times mean nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_every_table_is_printed_and_nothing_is_wrong(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks" / "tp_overlap.py"), "--device", "cpu", "--scale", "128", "--iterations", "1"]
    done = subprocess.run(
        [*command, "--json", str(rows_file)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "geometric mean over 9 shapes" in done.stdout
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"AG+GEMM", "GEMM+RS", "bulk AG", "bulk RS", "layer"}
    ours = [row for row in rows if row["variant"].startswith(("ours", "overlap on"))]
    assert len(ours) > 40
    for row in ours:
        assert row["timing"] is not None, row
        assert "WRONG" not in row["ok"], row
