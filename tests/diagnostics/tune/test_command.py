"""`primus-turbo tune`: listing without a GPU, honest refusals, and a run whose GPU is played by the test."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from primus_turbo_plugin.cli import main
from primus_turbo_plugin.devices import detect
from primus_turbo_plugin.diagnostics.tune import command, gemm_case
from primus_turbo_plugin.kernels.triton import gemm_key
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_tuning import TUNABLE
from primus_turbo_plugin.kernels.tuning.clock import Sample
from primus_turbo_plugin.kernels.tuning.codec import decode
from primus_turbo_plugin.kernels.tuning.file import read_entries
from primus_turbo_plugin.kernels.tuning.table import tuning_table
from tests.diagnostics.tune import toy_workers


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRIMUS_TURBO_CONFIG", "PRIMUS_TURBO_TUNING"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    jobs = [] if "--jobs" in arguments else ["--jobs", "0"]
    code = main(["tune", *arguments, *jobs])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_dry_run_lists_candidates_and_what_struck_others_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--dry-run",
        "--arch",
        "gfx950",
        "--model",
        "llama3_8b",
        "--precisions",
        "bf16,mxfp4",
        "--gemms",
        "fprop",
    ]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert out.count("llama3_8b.linear_") == 8
    assert "gemm nt 8192x28672x4096 bf16 x bf16 -> bf16 on gfx950" in out
    assert "shared memory, gfx950 has 160" in out
    assert "(not tuned)" in out
    code, verbose, _ = run(capsys, *arguments, "--verbose")
    assert len(verbose.splitlines()) > 4 * len(out.splitlines())


def test_a_dry_run_takes_recipes_from_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("precision: mxfp4\nbf16_first_layers: 1\nmodules: {'*.linear_fc2': mxfp8}")
    code, out, _ = run(
        capsys, *["--dry-run", "--arch", "gfx950", "--config", str(path), "--gemms", "fprop"],
        *["--model", "llama3_8b", "--tp", "2", "--tokens", "4096"],
    )  # fmt: skip
    assert code == 0
    names = [line.rpartition("(")[2].rstrip(")") for line in out.splitlines() if line.startswith("gemm ")]
    assert names == [
        f"llama3_8b.{linear} fprop {recipe}"
        for linear, recipes in {
            "linear_qkv": ("bf16", "mxfp4"),
            "linear_proj": ("bf16", "mxfp4"),
            "linear_fc1": ("bf16", "mxfp4"),
            "linear_fc2": ("bf16", "mxfp8"),
        }.items()
        for recipe in recipes
    ]
    assert "gemm nt 4096x3072x4096 " in out


def test_layers_of_given_sizes_are_told_apart_once_their_number_is_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("precision: mxfp4\nbf16_first_layers: 2\nbf16_last_layers: 2\n")
    arguments = [
        "--dry-run",
        "--arch",
        "gfx950",
        "--hidden",
        "1024",
        "--ffn",
        "4096",
        "--heads",
        "8",
        "--gemms",
        "fprop",
    ]
    code, _, err = run(capsys, *arguments, "--config", str(path))
    assert code == 1
    assert "Give --num-layers" in err
    code, out, _ = run(capsys, *arguments, "--config", str(path), "--num-layers", "40")
    assert code == 0
    assert {"fprop bf16)", "fprop mxfp4)"} <= {" ".join(line.split()[-2:]) for line in out.splitlines()}
    code, out, _ = run(capsys, *arguments, "--config", str(path), "--precisions", "mxfp8")  # asks no configuration
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--hidden"),
        (["--model", "llama9"], "no sizes are known"),
        (["--hidden", "64", "--ffn", "96", "--heads", "4", "--turbo-bf16-first-layers", "1"], "Give --num-layers"),
        (["--model", "llama3_8b", "--dry-run"], "name one with --arch"),
        (["--model", "llama3_8b", "--dry-run", "--arch", "gfx1250"], "give --compute-units"),
        (["--model", "llama3_8b", "--arch", "gfx950"], "--arch: only with --dry-run"),
        (["--model", "llama3_8b", "--precisions", "mxfp5"], "mxfp5"),
        (["--model", "llama3_8b", "--gemms", "fprob"], "did you mean 'fprop'"),
        (["--model", "llama3_8b", "--shapes", "1,2,3"], "leave --model"),
        (["--shapes", "8,8,8", "--head-dim", "64"], "leave --head-dim"),
        (["--shapes", "8,8,8", "--dry-run", "--arch", "gfx950", "--compute-units", "0"], "--compute-units must be"),
        (["--shapes", "8,8,8", "--dry-run", "--arch", "gfx950", "--max-candidates", "-3"], "got -3"),
        (["--shapes", "8,8,8", "--jobs", "-1"], "--jobs must be at least 0"),
        (["--shapes", "8,8,8", "--compile-limit", "0"], "--compile-limit"),
        (["--shapes", "8,8,8", "--backends", "tritn"], "did you mean 'triton'"),
        (["--shapes", "8,8,8", "--layouts", "ntn"], "--layouts"),
        (["--model", "llama3_8b", "--tokens", "0"], "--tokens and --tp"),
        (["--model", "llama3_8b", "--turbo-tuning-file", "/nowhere.json"], "/nowhere.json"),
    ],
)
@pytest.mark.skipif(detect().torch_device == "cuda", reason="a GPU is here")
def test_what_is_wrong_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 1
    assert words in err
    assert "Traceback" not in err + out


@pytest.mark.skipif(detect().torch_device == "cuda", reason="a GPU is here")
def test_without_a_gpu_nothing_is_timed_and_the_reason_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    code, _, err = run(capsys, "--model", "llama3_8b", "--out", str(path))
    assert code == 1
    assert "tune: times kernels on a GPU, and torch sees none" in err
    assert "--dry-run" in err
    assert not path.exists()


class PlayedCase:
    """A GPU on which narrow tiles are fast, 256 wide ones give wrong numbers, and 4 stages of pointer loads do not fit."""

    errors = (RuntimeError,)

    def __init__(self, task: Any, registry: Any) -> None:
        self.task, self.key = task, task.key("sm90", 132)

    def check(self, config: GemmConfig) -> str | None:
        if config.num_stages == 4 and config.loads == "pointers":
            raise RuntimeError("out of resource: shared memory")
        return "tile (0, 0) has 2.0 dB against float64" if config.block_m == 256 else None

    def watch(self, config: GemmConfig) -> Any:
        us = float(config.block_n + config.block_m / 10 + config.block_k / 100 + config.num_warps / 10)
        return argparse.Namespace(read=lambda repeats: [us] * repeats)

    def is_alive(self) -> str | None:
        return None

    def compare_backend(self, name: str) -> Sample | str:
        return Sample(us=20.0, low=19.0, high=21.0) if name == "torch" else "multiplies plain tensors only"


@pytest.fixture
def played_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(command, "cannot_time", lambda device: None)
    monkeypatch.setattr(gemm_key, "gpu_of", lambda index: ("sm90", 132))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gemm_case, "GemmCase", PlayedCase)
    monkeypatch.setattr(command, "launch_gemm", toy_workers.launch)


def test_a_run_prints_every_failure_and_writes_a_file_that_the_kernels_then_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, played_gpu: None
) -> None:
    path = tmp_path / "tuned.json"
    arguments = [
        "--shapes",
        "1024,2048,512",
        "--formats",
        "bf16,mxfp4",
        "--backends",
        "torch,gluon",
        "--out",
        str(path),
    ]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "won" in out
    assert "slower, default" in out
    assert "RuntimeError: out of resource: shared memory" in out
    assert "tile (0, 0) has 2.0 dB" in out
    assert "backend torch" in out
    assert "multiplies plain tensors only" in out
    assert "kernels: {gemm_nt: [torch, triton, reference]}" in out
    entries = read_entries(path)
    assert len(entries) == 2
    table = tuning_table(str(path))
    for entry in entries:
        key = decode(TUNABLE.key_type, entry.key, "key")
        config = table.config(TUNABLE, key)
        assert (config.block_n, config.block_m) == (64, 64)
        assert entry.us is not None
        assert entry.default_us is not None
        assert entry.us < entry.default_us
        assert entry.candidates == len(TUNABLE.candidates(key))
        reasons = {failure.reason for failure in entry.failures}
        assert reasons == {
            "failed: RuntimeError: out of resource: shared memory",
            "failed: tile (0, 0) has 2.0 dB against float64",
        }
        assert entry.backends == {"triton": entry.us, "torch": 20.0}
    assert json.loads(path.read_text())["schema"] == 1
    code, out, _ = run(capsys, "--show", "--arch", "sm90", "--turbo-tuning-file", str(path))
    assert code == 0
    shown = " ".join(out.split())
    for word in (
        "1024x2048x512",
        "e2m1(1x32)",
        path.name,
        "default",
        "torch 20.0 us",
        "block_m=64 block_n=64",
        "failed",
    ):
        assert word in shown, word
    code, out, _ = run(capsys, "--show", "--arch", "gfx942", "--turbo-tuning-file", str(path))
    assert (code, out) == (0, "No tuned configuration applies on gfx942: every kernel runs its default.\n")


def test_a_case_in_which_nothing_works_is_an_error_and_no_entry(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, played_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        PlayedCase, "check", lambda self, config: "12 of 64 results are not finite, or were not written"
    )
    path = tmp_path / "tuned.json"
    code, out, _ = run(capsys, "--shapes", "1024,2048,512", "--out", str(path))
    assert code == 1
    assert "nothing works here: no entry is written" in out
    assert read_entries(path) == ()


def test_where_the_default_fails_what_works_is_written_down(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, played_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = PlayedCase.check

    def refuses_default(self: PlayedCase, config: GemmConfig) -> str | None:
        return "the default is wrong here" if config == TUNABLE.default(self.key) else check(self, config)

    monkeypatch.setattr(PlayedCase, "check", refuses_default)
    path = tmp_path / "tuned.json"
    code, out, _ = run(capsys, "--shapes", "1024,2048,512", "--out", str(path))
    assert code == 0
    assert "the default is wrong here" in out
    (entry,) = read_entries(path)
    assert entry.default_us is None
    assert "failed: the default is wrong here" in {failure.reason for failure in entry.failures}
    key = decode(TUNABLE.key_type, entry.key, "key")
    assert tuning_table(str(path)).config(TUNABLE, key) != TUNABLE.default(key)
    _, out, _ = run(capsys, "--show", "--arch", "sm90", "--turbo-tuning-file", str(path))
    assert "default failed" in " ".join(out.split())


def test_a_gpu_that_breaks_keeps_earlier_cases_and_stops(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, played_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = PlayedCase.is_alive
    monkeypatch.setattr(
        PlayedCase, "is_alive", lambda self: "the GPU takes no more work" if self.task.cols == 4096 else alive(self)
    )
    path = tmp_path / "tuned.json"
    code, out, err = run(capsys, "--shapes", "1024,2048,512", "1024,4096,512", "64,64,64", "--out", str(path))
    assert code == 1
    assert "the GPU takes no more work" in err
    assert "candidates not tried" in out
    assert [entry.key["cols"] for entry in read_entries(path)] == [2048]


def test_a_file_that_cannot_be_written_to_is_refused_before_anything_is_timed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, played_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlayedCase, "__init__", lambda *_: pytest.fail("a case was made"))
    foreign = tmp_path / "foreign.json"
    foreign.write_text("[1]")
    for path, words in ((foreign, "is no tuning file"), (tmp_path / "no" / "t.json", "writable folder")):
        code, _, err = run(capsys, "--shapes", "64,64,64", "--out", str(path))
        assert code == 1
        assert words in err
    assert foreign.read_text() == "[1]"


def test_resume_leaves_out_what_the_file_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, played_gpu: None
) -> None:
    path = str(tmp_path / "tuned.json")
    run(capsys, "--shapes", "1024,2048,512", "--out", path)
    _, out, _ = run(capsys, "--shapes", "1024,2048,512", "512,512,512", "--out", path, "--resume")
    assert "1 cases into" in out
    assert "1024x2048x512" not in out
    _, out, _ = run(capsys, "--shapes", "1024,2048,512", "--out", path)
    assert "1024x2048x512" in out


def test_a_time_limit_leaves_cases_out_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, played_gpu: None
) -> None:
    code, out, _ = run(capsys, "--shapes", "64,64,64", "--time-limit", "-1", "--out", str(tmp_path / "t.json"))
    assert code == 1
    assert "1 cases left out: --time-limit -1 is over" in out
