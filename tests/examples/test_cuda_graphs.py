"""Megatron's own CUDA graphs over quantised layers: training goes as it does without them, step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")

from primus_turbo_plugin.training.metrics import MetricsReader
from tests.support.gpt_arguments import tiny_gpt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none"),
]

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "train_iters": 8,
    "global_batch_size": 4,
    "lr": 1e-2,  # so that a weight which stayed as it was would be seen in the next step
}


def _losses(folder: Path, *argv: str) -> list[float]:
    """Losses of a small GPT on one GPU, two microbatches a step."""
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    script = ROOT / "examples" / "pretrain_gpt.py"
    command = [sys.executable, str(script), *tiny_gpt(*argv, device="cuda", **SIZES), "--turbo-metrics", str(metrics)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert ("CUDA graph" in done.stdout + done.stderr) == ("--cuda-graph-impl" in argv)
    return [metric.value for metric in MetricsReader(metrics).new() if metric.tag == "lm loss"]


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8", "fp8_tensorwise"])
def test_graphs_train_what_launches_do(recipe: str, tmp_path: Path) -> None:
    launched = _losses(tmp_path / "launched", "--turbo-precision", recipe)
    captured = _losses(tmp_path / "captured", "--turbo-precision", recipe, "--cuda-graph-impl", "local")
    assert len(launched) == SIZES["train_iters"]
    assert launched[-1] < launched[0] - 0.1
    assert captured == launched
