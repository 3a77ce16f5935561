"""`primus-turbo trace` on a training command, from the command line to the Chrome trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")

from tests.support.gpt_arguments import tiny_gpt

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]


def test_a_traced_training_run_lists_every_collective(tmp_path: Path) -> None:
    """Column- and row-parallel layers, forward and backward, of both traced steps and both ranks."""
    argv = tiny_gpt("--sequence-parallel", "--tp-comm-overlap", tensor_model_parallel_size=2, train_iters=3)
    command = [sys.executable, str(ROOT / "examples" / "pretrain_gpt.py"), "--nproc", "2", *argv]
    tool = [sys.executable, "-m", "primus_turbo_plugin.cli", "trace", "--steps", "2-3", "--out", "trace.json", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*tool, "--", *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "transport: shared_memory over 2 ranks" in done.stdout
    rows = {row["name"]: row for row in json.loads(done.stdout[done.stdout.rindex("\n[") :])}
    layer = "decoder.layers.*"
    collectives = {
        *(
            f"{layer}.{linear} {what}"
            for linear in ("self_attention.linear_qkv", "mlp.linear_fc1")
            for what in ("fprop", "x for wgrad", "dx under wgrad")
        ),
        *(
            f"{layer}.{linear} {what}"
            for linear in ("self_attention.linear_proj", "mlp.linear_fc2")
            for what in ("fprop", "dgrad")
        ),
    }
    assert set(rows) == collectives
    for name, row in rows.items():
        assert row["calls"] == 2 * 2 * 4, name  # steps, layers, micro batches
        assert row["transport"] == "shared_memory"
        assert row["engine"] == "cpu threads"
        assert row["copy_ms"] > 0
        assert 0 <= row["hidden"] <= 1
        assert row["nbytes"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert any(event["name"] == "put to rank 1 (decoder.layers.1.mlp.linear_fc2 fprop)" for event in events)
