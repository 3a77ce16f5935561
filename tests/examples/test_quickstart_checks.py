"""What the quickstart refuses before it does anything, in its own flags' words; and what it leaves behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")
pytest.importorskip("tokenizers")

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.training.launch import Failure, RanksFailed

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_help_says_the_default_of_every_flag(
    quickstart: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        quickstart.parse(["--help"])
    flags = capsys.readouterr().out.split("model:")[1].split("\n  --")[1:]
    assert len(flags) > 20
    assert [flag for flag in flags if flag.count("(default: ") != 1] == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--kv-heads 3", "--kv-heads 3 does not divide --heads 8. Take one of 1, 2, 4, 8,"),
        ("--kv-heads 1", "--tp 2 does not divide --kv-heads 1."),
        ("--heads 3 --kv-heads 3 --hidden 96", "--tp 2 does not divide --heads 3."),
        ("--hidden 100", "--heads 8 does not divide --hidden 100."),
        ("--hidden 24", "--hidden 24: a head has 3 channels"),
        ("--ffn 33", "--tp 2 does not divide --ffn 33."),
        ("--layers 3", "--pp 2 does not divide --layers 3."),
        ("--seq 33", "--seq 33 must be a multiple of 2"),
        ("--batch 6", "--batch 6 must be a multiple of --micro-batch 4 x 1 data-parallel ranks = 4. Take 8."),
        ("--dp 3", "x 3 data-parallel ranks = 12. Take 12."),
        ("--steps 1", "--steps: at least 2, got 1."),
        ("--characters 0", "--characters: at least 1, got 0."),
        ("--vocab 0", "--vocab: at least 258, got 0."),
        ("--vocab 70000", "--vocab: at most 65536, got 70000."),
        ("--lr 0", "--lr: more than 0, got 0.0."),
        *((f"--{name} 0", f"--{name}: at least 1, got 0.") for name in ("tp", "pp", "dp", "batch", "micro-batch")),
        *((f"--{name} -1", f"--{name}: at least 1, got -1.") for name in ("layers", "hidden", "ffn", "heads", "seq")),
        ("--eval-iters 0", "--eval-iters: at least 1, got 0."),
    ],
)
def test_numbers_that_do_not_fit_are_refused_in_the_quickstarts_words(
    argv: str, words: str, quickstart: ModuleType, tmp_path: Path
) -> None:
    options = quickstart.parse([*argv.split(), "--out", str(tmp_path / "out")])
    with pytest.raises(ConfigError) as raised:
        quickstart.check(options)
    assert words in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_the_defaults_pass(quickstart: ModuleType, tmp_path: Path) -> None:
    options = quickstart.parse(["--out", str(tmp_path / "deep" / "out")])
    assert quickstart.check(options) == ["bf16", "mxfp4"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_under_a_file_is_refused(quickstart: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "deep" / "out"
    with pytest.raises(ConfigError, match=r"--out .*/file/deep: cannot be written \(.*Not a directory\)"):
        quickstart.check(quickstart.parse(["--out", str(out)]))
    with pytest.raises(ConfigError, match=r"--out .*: cannot be written"), quickstart.all_or_nothing(out):
        pass


def test_too_little_text_is_refused_before_training(
    quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--characters", "10", "--vocab", "258", "--out", str(tmp_path / "out")]
    assert quickstart.main(argv) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: --characters 10: gives 1 documents, and none for validation")
    assert list(tmp_path.iterdir()) == []


def _end_with(error: BaseException, run: str, quickstart: ModuleType, tmp_path: Path) -> None:
    with quickstart.all_or_nothing(tmp_path / "out") as folder:
        (folder / run / "logs").mkdir(parents=True)
        (folder / run / "logs" / "rank1.log").write_text(run)
        raise error


def test_after_a_failure_the_logs_are_kept_and_named(quickstart: ModuleType, tmp_path: Path) -> None:
    kept = tmp_path / "out.failed-logs"
    for attempt in ("first", "second"):
        failure = RanksFailed(Failure(1, "it broke.", "trace", 0.0, expected=True), 2)
        with pytest.raises(RanksFailed) as raised:
            _end_with(failure, attempt, quickstart, tmp_path)
        assert str(raised.value) == f"rank 1 of 2: it broke. The processes' logs are in {kept}."
        assert list(tmp_path.iterdir()) == [kept]
        assert [path.relative_to(kept).as_posix() for path in kept.rglob("*.log")] == [f"{attempt}/rank1.log"]


def test_an_interrupted_run_leaves_nothing(quickstart: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _end_with(KeyboardInterrupt(), "run", quickstart, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_is_an_exit_inside_main_only(quickstart: ModuleType) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match=r"^143$"), quickstart.sigterm_exits():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_sigterm_while_training_stops_the_ranks_and_removes_the_scratch_folder(tmp_path: Path) -> None:
    tiny = "--layers 2 --hidden 64 --ffn 128 --heads 4 --kv-heads 2 --vocab 300 --seq 32 --characters 200000"
    command = [sys.executable, str(SCRIPT), *tiny.split(), "--steps", "100000", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        log = tmp_path / ".out.partial" / "bf16" / "logs" / "rank0.log"
        deadline = time.monotonic() + 300
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert log.exists()
        process.terminate()
        assert process.wait(timeout=60) == 143
    assert list(tmp_path.iterdir()) == []
