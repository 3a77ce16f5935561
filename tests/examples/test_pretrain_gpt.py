"""`examples/pretrain_gpt.py` and the job behind it, on real processes and tiny models."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")

from primus_turbo_plugin.training import launch
from primus_turbo_plugin.training.checkpoint_compare import compare_checkpoints
from primus_turbo_plugin.training.metrics import MetricsReader
from tests.support.gpt_arguments import tiny_gpt

pytestmark = [pytest.mark.slow, pytest.mark.megatron]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"


def _train(folder: Path, world_size: int, argv: list[str]) -> dict[str, dict[int, float]]:
    """Train; what Megatron logged: tag -> step -> value."""
    folder.mkdir(exist_ok=True)
    metrics = folder / "metrics.jsonl"
    argv = [*argv, "--turbo-metrics", str(metrics)]
    with launch.start_ranks("primus_turbo_plugin.training.pretrain:train", argv, world_size, logs=folder) as ranks:
        ranks.wait()
    logged: dict[str, dict[int, float]] = {}
    for metric in MetricsReader(metrics).new():
        logged.setdefault(metric.tag, {})[metric.step] = metric.value
    return logged


def _script(*argv: str, folder: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("RANK", None)
    command = [sys.executable, *launcher, str(SCRIPT), *argv]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_our_layers_train_like_megatrons_own(tmp_path: Path) -> None:
    argv = tiny_gpt(tensor_model_parallel_size=2, train_iters=4)
    ours = _train(tmp_path / "ours", 2, argv)
    theirs = _train(tmp_path / "theirs", 2, [*argv, "--turbo-spec", "megatron"])
    assert list(ours["lm loss"]) == [1, 2, 3, 4]
    for step, loss in theirs["lm loss"].items():
        assert ours["lm loss"][step] == pytest.approx(loss, rel=1e-2)
    assert ours["lm loss"][4] < ours["lm loss"][1] - 0.1
    assert ours["lm loss validation"][4] == pytest.approx(theirs["lm loss validation"][4], rel=1e-2)


def test_mixture_of_experts_trains_in_mxfp4_over_tensor_and_expert_parallel_ranks(tmp_path: Path) -> None:
    moe = (
        "--num-experts",
        "4",
        "--moe-router-topk",
        "2",
        "--moe-ffn-hidden-size",
        "64",
        "--moe-aux-loss-coeff",
        "0.01",
    )
    moe += ("--moe-token-dispatcher-type", "alltoall", "--expert-tensor-parallel-size", "1", "--moe-grouped-gemm")
    parallel = ("--expert-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer")
    argv = tiny_gpt(*moe, *parallel, "--turbo-precision", "mxfp4", tensor_model_parallel_size=2, train_iters=4)
    logged = _train(tmp_path, 4, argv)
    assert logged["lm loss"][4] < logged["lm loss"][1] - 0.1
    assert len(logged["load_balancing_loss"]) == 4


def test_multi_token_prediction_layers_are_ours_and_train(tmp_path: Path) -> None:
    """Megatron's own builder ignores the spec for these; the start-up report lists what really runs."""
    argv = tiny_gpt(
        "--mtp-num-layers", "1", "--turbo-precision", "mxfp8", pipeline_model_parallel_size=2, train_iters=4
    )
    logged = _train(tmp_path, 2, argv)
    assert logged["mtp_1 loss"][4] < logged["mtp_1 loss"][1]
    assert "mtp.layers.0" in (tmp_path / "rank0.log").read_text()


def test_a_resumed_run_is_bit_identical_with_dropout_and_stochastic_rounding(tmp_path: Path) -> None:
    """Weights, moments, random numbers and the place in the data all continue; each would show in a loss."""
    recipe = "{preset: mxfp4, dy: {rounding: stochastic}}"
    options = (
        "--turbo-precision",
        recipe,
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--save-interval",
        "3",
    )
    sizes = {"tensor_model_parallel_size": 2, "train_iters": 6, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    argv = tiny_gpt(*options, **sizes)
    whole = _train(tmp_path / "whole", 2, [*argv, "--save", str(tmp_path / "whole" / "c")])
    resume = ["--load", str(tmp_path / "whole" / "c"), "--ckpt-step", "3", "--save", str(tmp_path / "resumed" / "c")]
    resumed = _train(tmp_path / "resumed", 2, [*argv, *resume])
    assert list(resumed["lm loss"]) == [4, 5, 6]
    for tag in ("lm loss", "grad-norm", "lm loss validation"):
        assert resumed[tag] == {step: whole[tag][step] for step in resumed[tag]}
    states = compare_checkpoints(tmp_path / "whole" / "c" / "iter_0000006", tmp_path / "resumed" / "c" / "iter_0000006")
    assert states.identical, states.different
    assert 0 not in (states.num_weights, states.num_optimizer, states.num_rng)


def test_the_script_runs_under_torchrun_and_leaves_megatrons_logs_intact(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = _script(*tiny_gpt(tensor_model_parallel_size=2, train_iters=2), folder=tmp_path, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lm loss:") == 2
    assert "validation loss at iteration 2" in done.stdout


def _refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    return errors[0]


def test_a_contraction_that_is_no_multiple_of_32_is_refused_by_choice(tmp_path: Path) -> None:
    argv = tiny_gpt("--nproc", "2", "--turbo-precision", "mxfp4", "--turbo-padding", "refuse", ffn_hidden_size=100)
    error = _refused(_script(*argv, "--save", "new", "--save-interval", "1", folder=tmp_path))
    assert "must be a multiple of 32" in error
    assert "padding: pad" in error
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_checkpoint_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    argv = tiny_gpt("--save-interval", "1", train_iters=2)
    _train(tmp_path / "run", 1, [*argv, "--save", str(tmp_path / "c")])
    file = sorted((tmp_path / "c" / "iter_0000002").glob("*.distcp"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    error = _refused(
        _script("--nproc", "1", *argv, "--load", str(tmp_path / "c"), "--save", "new", folder=tmp_path / "cwd")
    )
    assert f"{file.name} is truncated" in error
    assert "--ckpt-step (1)" in error
    assert list((tmp_path / "cwd").iterdir()) == []


def test_the_command_of_the_documentation_works_as_it_stands(tmp_path: Path) -> None:
    """Word by word: what it leaves out must have a default."""
    text = (ROOT / "docs" / "quickstart.md").read_text().replace("\\\n", " ")
    command = next(line for line in text.splitlines() if line.startswith("python examples/pretrain_gpt.py"))
    ran = _script(*shlex.split(command)[2:], folder=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "validation loss" in ran.stdout
