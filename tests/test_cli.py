"""The command line: exit codes, output for people and for scripts, and what it may not cost."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from primus_turbo_plugin import __version__
from primus_turbo_plugin.cli import main


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIMUS_TURBO_CONFIG", raising=False)


def write(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_of_this_machine_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for title in ("Device", "Software", "Formats", "Served by", "Configuration"):
        assert f"{title}\n" in text


def test_json_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys)
    assert (code, data["healthy"]) == (0, True)
    assert data["package"] == __version__
    assert capsys.readouterr().err == ""


def test_config_file_is_resolved_and_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, "precision: mxfp4\nbf16_last_layers: 1")
    code, data = run_json(capsys, "--config", path)
    assert code == 0
    assert data["config"]["values"]["precision"] == "mxfp4"
    assert data["config"]["origins"] == {"precision": path, "bf16_last_layers": path}


def test_configuration_of_the_environment_is_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "precision: mxfp8")
    monkeypatch.setenv("PRIMUS_TURBO_CONFIG", path)
    _, data = run_json(capsys)
    assert data["config"]["values"]["precision"] == "mxfp8"
    assert data["variables"] == {**data["variables"], "PRIMUS_TURBO_CONFIG": path}


def test_flags_are_checked_as_a_training_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys, "--turbo-precision", "mxfp4_all", "--turbo-kernels", "torch,reference")
    assert code == 0
    assert data["config"]["operands"]["fprop.x"] == "mxfp4(e2m1, 1x32, even, H16)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precison: mxfp4", "did you mean 'precision'"),
        ("{precision: mxfp4, kernels: [torch]}", "plain tensors only"),
        ("kernels: [nvcc]", "'nvcc'"),
        ("kernels: {gemm: [torch]}", "unknown op 'gemm'"),
        ("precision: {", "not valid YAML"),
    ],
)
def test_something_asked_for_that_is_broken_exits_1_and_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    path = write(tmp_path, text)
    assert main(["doctor", "--config", path]) == 1
    out = capsys.readouterr().out
    assert words in " ".join(out.split("Broken\n")[1].split())
    code, data = run_json(capsys, "--config", path)
    assert (code, data["healthy"]) == (1, False)
    assert any(words in problem["what"] for problem in data["problems"])


def test_missing_config_file_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", "nowhere.yaml"]) == 1
    assert "nowhere.yaml" in capsys.readouterr().out


def test_self_test_is_run_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys, "--selftest")
    assert code == 0
    assert {item["outcome"] for item in data["selftest"]} <= {"passed", "not claimed"}
    assert data["device"]["name"]
    assert run_json(capsys)[1]["selftest"] is None


def test_self_test_of_a_gpu_runs_in_a_process_of_its_own_within_the_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from primus_turbo_plugin.diagnostics import doctor, selftest_guard
    from primus_turbo_plugin.diagnostics.selftest import CaseResult
    from tests.diagnostics.machines import device

    asked: dict[str, object] = {}

    def guarded(torch_device: str, *, limit_s: float, started: float, progress: object) -> tuple[CaseResult, ...]:
        assert 0 < time.monotonic() - started < limit_s, "the limit is the command's: what was imported before counts"
        asked.update(torch_device=torch_device, limit_s=limit_s)
        return (CaseResult(op="norm", backend="triton", case="rows", outcome="not run", detail="the time was up"),)

    examine = doctor.examine
    monkeypatch.setattr(doctor, "examine", lambda *args: examine(*args, device=device("gfx950")))
    monkeypatch.setattr(selftest_guard, "run_guarded", guarded)
    code, data = run_json(capsys, "--selftest", "--selftest-limit", "30")
    assert asked == {"torch_device": "cuda", "limit_s": 30.0}
    assert (code, data["healthy"], data["selftest"][0]["outcome"]) == (1, False, "not run")


def test_a_self_test_that_hangs_outside_its_processes_ends_all_the_same(tmp_path: Path) -> None:
    """In a driver, for instance, that never answers what the device is; and says where it hung."""
    script = tmp_path / "doctor.py"
    script.write_text(
        "import sys, time\n"
        "from primus_turbo_plugin import cli\n"
        "from primus_turbo_plugin.diagnostics import doctor\n"
        "def answers_never(*args):\n    time.sleep(600)\n"
        "doctor.examine = answers_never\n"
        "sys.exit(cli.main(['doctor', '--selftest', '--selftest-limit', '1']))\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "in answers_never" in ended.stderr


def test_failing_kernel_exits_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from primus_turbo_plugin.kernels.torch_native import gemm

    monkeypatch.setattr(gemm, "gemm_nt", lambda a, b, **kwargs: a.float() @ b.float().T + 1)
    code, data = run_json(capsys, "--selftest")
    assert code == 1
    failed = {item["backend"] for item in data["selftest"] if item["outcome"] == "failed"}
    assert failed == {"torch", "per_expert"}, "experts go one by one through the best ordinary GEMM, which is torch's"


@pytest.mark.parametrize("limit", ["inf", "nan", "1e12", "0", "-5", "soon"])
def test_a_limit_that_no_clock_can_keep_is_a_wrong_command_line(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--selftest", f"--selftest-limit={limit}"])
    assert ended.value.code == 2
    assert f"must be seconds, more than 0 and at most 604800, got '{limit}'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["diagnose"], ["selftest"], []])
def test_unknown_or_missing_command_exits_2_and_lists_those_that_exist(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err.splitlines()[-1]


def test_help_of_doctor_names_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--json", "--selftest", "--config", "--turbo-precision", "mxfp4_wgrad"):
        assert flag in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"primus-turbo-plugin {__version__}"


def test_torch_that_cannot_be_imported_is_a_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise OSError("libamdhip64.so: cannot open\nshared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    assert main(["doctor"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "libamdhip64.so: cannot open shared object file" in error
    assert "Install" in error


def test_doctor_imports_no_megatron_and_takes_less_than_5_seconds_of_computing() -> None:
    """CPU time, not wall time: a busy machine must not fail this."""
    code = (
        "import sys, time; from primus_turbo_plugin.cli import main; code = main(['doctor']);"
        "loaded = sorted(name for name in sys.modules if name.startswith(('megatron', 'transformer_engine')));"
        "print('LOADED', loaded, file=sys.stderr); print('SECONDS', time.process_time(), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = dict(line.split(" ", 1) for line in done.stderr.splitlines() if line.startswith(("LOADED", "SECONDS")))
    assert facts["LOADED"] == "[]"
    assert float(facts["SECONDS"]) < 5.0


def test_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m primus_turbo_plugin.cli doctor | head -1", shell=True, capture_output=True, text=True
    )
    assert done.stdout == "Device\n"
    assert "Traceback" not in done.stderr


def test_amd_kernels_are_emulated_and_read_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="AMD kernels are compiled by Triton, which is not installed")
    kernels = str(Path(__file__).parent / "amdgcn" / "kernels" / "elementwise.py")
    assert main(["emulate", f"{kernels}:vector_add", "--arch", "gfx950", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["target"], entry["arch"], entry["ok"]) == ("vector_add", "gfx950", True)
    assert entry["emulated_instructions"] > 0
    assert main(["isa", f"{kernels}:vector_add", "--arch", "gfx1250"]) == 0
    assert "kernel     vector_add for gfx1250, 4 waves per work-group" in capsys.readouterr().out
    assert main(["emulate", f"{kernels}:no_such_target"]) == 1
    assert "no_such_target" in capsys.readouterr().err
