"""The quickstart, in seconds instead of minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")
pytest.importorskip("tokenizers")

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]
TINY = (
    *("--layers", "2", "--hidden", "64", "--ffn", "128", "--heads", "4", "--kv-heads", "2"),
    *("--vocab", "512", "--seq", "32", "--characters", "400000", "--eval-iters", "1"),
)


def _quickstart(*argv: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), *TINY, *argv]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def test_it_trains_both_recipes_resumes_and_reports(tmp_path: Path) -> None:
    done = _quickstart("--steps", "20", "--save-at", "12", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "runs" / "quickstart"
    results = json.loads((out / "results.json").read_text())
    assert list(results["recipes"]) == ["bf16", "mxfp4"]
    for recipe in results["recipes"].values():
        losses = list(recipe["losses"].values())
        assert len(losses) == 20
        assert losses[-1] < losses[0] - 0.15
        assert recipe["validation_loss"] < losses[0] - 0.15
        assert recipe["tokens_per_s"] > 0
    bf16, mxfp4 = (list(r["losses"].values()) for r in results["recipes"].values())
    assert bf16 != mxfp4
    assert mxfp4 == pytest.approx(bf16, rel=0.02)  # the same weights and batches, other roundings
    assert "8 losses" in results["resumed"]
    assert "bit-identical" in results["resumed"]
    for words in (
        results["resumed"],
        "validation loss",
        "tokens/s",
        "mxfp4: step 20/20",
        "mxfp4, resumed at 12: step 13/20",
    ):
        assert words in done.stdout
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["quickstart"]


def test_overlapped_collectives_train_to_the_same_losses(tmp_path: Path) -> None:
    """Over shared memory, where every schedule runs for real: bits of a run repeat, and the resumed run must find them too."""
    argv = ("--recipes", "mxfp4", "--steps", "4", "--save-at", "3", "--pp", "1")
    losses = []
    for flags in ((), ("--overlap",)):
        folder = tmp_path / "-".join(("run", *flags))
        folder.mkdir()
        done = _quickstart(*argv, *flags, folder=folder)
        assert done.returncode == 0, done.stderr
        out = folder / "runs" / "quickstart"
        results = json.loads((out / "results.json").read_text())
        losses.append(list(results["recipes"]["mxfp4"]["losses"].values()))
        report = (out / "mxfp4" / "logs" / "rank0.log").read_text()
        assert ("transport: shared_memory over 2 ranks, data moved by cpu threads" in report) == bool(flags)
        assert ("tp_comm_overlap = True" in report) == bool(flags)
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_failure_on_the_way_leaves_the_logs_and_nothing_else(tmp_path: Path) -> None:
    """Only the processes, once they build the model, find out that a pattern matches none of its modules."""
    (tmp_path / "recipe.yaml").write_text("modules: {'encoder.*': mxfp8}\n")
    done = _quickstart("--steps", "4", folder=tmp_path, PRIMUS_TURBO_CONFIG=str(tmp_path / "recipe.yaml"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "encoder.*" in done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["quickstart.failed-logs"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--recipes", "bf16,mxfp5"), "mxfp5"),
        (("--recipes", "bf16,bf16"), "--recipes: one or more different presets"),
        (("--steps", "4", "--save-at", "4"), "--save-at: between 1 and 3"),
        (("--overlap", "--tp", "1"), "--overlap: --tp 1 has no tensor-parallel collectives"),
        (("--out", "."), "exists, and is not a quickstart's folder"),
    ],
)
def test_a_wrong_flag_is_found_before_anything_is_done(argv: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = _quickstart(*argv, folder=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert words in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_the_shell_script_runs_it_in_the_environment_it_made(tmp_path: Path) -> None:
    """With an environment that is complete already, nothing is installed and the arguments arrive."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    stamp = f'touch "{venv}/.turbo-training-$(cksum <"{ROOT}/pyproject.toml" | tr " " "-")"'
    subprocess.run(["bash", "-c", stamp], check=True)
    environment = {**os.environ, "PRIMUS_TURBO_VENV": str(venv), "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "examples" / "quickstart.sh"), "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--recipes" in done.stdout
