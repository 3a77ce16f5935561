"""Mistakes that are found before anything is set up or written: one line, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")

from primus_turbo_plugin.errors import TurboError
from primus_turbo_plugin.training import arguments, preflight
from primus_turbo_plugin.training.pretrain import cli
from tests.support.gpt_arguments import tiny_gpt


@pytest.fixture(autouse=True)
def _nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    monkeypatch.delenv("RANK", raising=False)
    yield
    assert list((tmp_path / "cwd").iterdir()) == []


def _refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli(argv) == 1
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:], captured.err
    assert "Traceback" not in captured.err
    return errors[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (tiny_gpt("--turbo-precison", "mxfp4"), "--turbo-precison: no such argument; did you mean --turbo-precision?"),
        (tiny_gpt("--hiden-size", "4"), "--hiden-size: no such argument; did you mean --hidden-size?"),
        (tiny_gpt("--turbo-precision", "mxfp44"), "did you mean 'mxfp4'?"),
        (tiny_gpt("--turbo-padding", "maybe"), "invalid choice: 'maybe'"),
        (tiny_gpt(device="tpu"), "argument --device: invalid choice: 'tpu'"),
        (tiny_gpt(num_layers="two"), "argument --num-layers: invalid int value: 'two'"),
        (tiny_gpt("--nproc", "0"), "--nproc: at least 1, got 0"),
        (tiny_gpt("--nproc", "2", device="cuda"), "use torchrun --nproc-per-node 2"),
        (tiny_gpt(device="cuda"), "Pass --device cpu"),
        (
            tiny_gpt(tensor_model_parallel_size=3),
            "1 processes cannot hold tensor x pipeline x context parallel = 3 x 1 x 1. Start a multiple of 3 (--nproc)",
        ),
        (tiny_gpt("--fp16"), "--fp16 and --bf16: there can be one"),
        (tiny_gpt("--sft"), "--sft: this script pretrains GPT models only"),
        (tiny_gpt("--hybrid-layer-pattern", "*-*-"), "--spec primus_turbo_plugin.megatron_lm hybrid_spec"),
        (tiny_gpt("--dataloader-type", "external"), "Use single or cyclic"),
        (tiny_gpt(global_batch_size=7), "x 1 data-parallel ranks = 2. Take 8."),
        (tiny_gpt(drop=("mock-data",)), "no dataset: give --data-path PREFIX"),
        (
            tiny_gpt("--data-path", "nowhere/text", drop=("mock-data",)),
            "nowhere/text.idx and nowhere/text.bin not found",
        ),
        (tiny_gpt("--data-path", "text"), "--mock-data, --data-path: there can be one source of data. Keep one"),
        (
            tiny_gpt("--data-path", "text", "--valid-data-path", "more", drop=("mock-data",)),
            "--data-path, --valid-data-path: there can be one",
        ),
        (
            tiny_gpt("--train-data-path", "text", "--valid-data-path", "more", drop=("mock-data",)),
            "dataset text: text.idx and text.bin not found",
        ),
        (tiny_gpt("--data-args-path", "nowhere.txt", drop=("mock-data",)), "nowhere.txt cannot be read"),
        (tiny_gpt("--load", "nowhere"), "--load nowhere: no checkpoint there"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if argv[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("asks for a GPU, and here is one")
    assert words in _refusal(argv, capsys)


def test_a_wrong_key_in_the_yaml_file_names_file_and_nearest_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("precison: mxfp4\n")
    text = _refusal(tiny_gpt("--turbo-config", str(file)), capsys)
    assert str(file) in text
    assert "did you mean 'precision'?" in text


def test_half_a_dataset_names_the_missing_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.bin").touch()
    argv = tiny_gpt("--data-path", "0.3", str(tmp_path / "text"), "0.7", str(tmp_path / "text"), drop=("mock-data",))
    text = _refusal(argv, capsys)
    assert f"{tmp_path}/text.idx not found" in text
    assert "text.bin and" not in text


def test_the_traceback_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(tiny_gpt("--load", "nowhere", "--turbo-traceback")) == 1
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert captured.strip().splitlines()[-1].startswith("error: --load nowhere")


def test_nproc_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "RANK is set" in _refusal(tiny_gpt("--nproc", "2"), capsys)


def _check(argv: list[str], world_size: int) -> None:
    args = arguments.parse(argv, "cpu")
    args.world_size = world_size
    preflight.check(args)


@pytest.mark.parametrize(
    ("argv", "world_size", "words"),
    [
        (tiny_gpt(tensor_model_parallel_size=3), 3, "does not divide --num-attention-heads 4. Take one of 1, 2, 4"),
        (tiny_gpt("--sequence-parallel", tensor_model_parallel_size=2, seq_length=33), 2, "Take 34"),
        (tiny_gpt(context_parallel_size=2, seq_length=34), 2, "must be a multiple of 4"),
        (tiny_gpt(global_batch_size=6), 2, "x 2 data-parallel ranks = 4. Take 8."),
        (tiny_gpt("--num-experts", "4", tensor_model_parallel_size=2), 2, "Pass --expert-tensor-parallel-size 1"),
        (tiny_gpt("--cuda-graph-impl", "local"), 1, "Leave it out with --device cpu"),
        (tiny_gpt("--enable-cuda-graph"), 1, "--enable-cuda-graph: a CPU captures no graphs"),
        (tiny_gpt("--external-cuda-graph"), 1, "--external-cuda-graph: a CPU captures no graphs"),
        (tiny_gpt("--optimizer-cuda-graph"), 1, "--optimizer-cuda-graph: a CPU captures no graphs"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(argv: list[str], world_size: int, words: str) -> None:
    with pytest.raises(TurboError) as raised:
        _check(argv, world_size)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        (tiny_gpt("--sequence-parallel", tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 8),
        (tiny_gpt(context_parallel_size=2), 4),
        (tiny_gpt("--num-experts", "4", "--expert-tensor-parallel-size", "1", tensor_model_parallel_size=2), 4),
        (tiny_gpt("--save", "new", "--load", "new"), 1),
        (tiny_gpt("--data-path", "s3://bucket/text", drop=("mock-data",)), 1),
    ],
)
def test_what_fits_passes(argv: list[str], world_size: int) -> None:
    _check(argv, world_size)
