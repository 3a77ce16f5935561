"""The guarded self-test: a kernel that hangs, ends its process or spoils the device costs one case and is named, in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from primus_turbo_plugin.diagnostics import selftest_worker
from primus_turbo_plugin.diagnostics.selftest import CaseResult, SelfTest, in_order
from primus_turbo_plugin.diagnostics.selftest_guard import run_guarded, show_progress
from primus_turbo_plugin.diagnostics.selftest_worker import serve

Check = Callable[[torch.device], "str | None"]


def fine(device: torch.device) -> str | None:
    return None


def wrong(device: torch.device) -> str | None:
    return "y: 1 of 1 differ"


def hangs(device: torch.device) -> str | None:
    time.sleep(600)
    return None


def ends(device: torch.device) -> str | None:
    os._exit(134)


def made(*checks: Check) -> list[SelfTest]:
    return [SelfTest("op", f"kernel{i}", "case", None, check) for i, check in enumerate(checks)]


def mixed(device: str, cores: int, pipe: Connection) -> None:
    serve(made(fine, wrong, ends, fine, hangs, fine), device, pipe)


def slow(device: str, cores: int, pipe: Connection) -> None:
    serve(made(fine, hangs, fine), device, pipe)


def takes_others_along(device: str, cores: int, pipe: Connection) -> None:
    """As a reset of a GPU does: whoever runs while the mark is there ends, and says so in the file."""
    mark = Path(os.environ["SELFTEST_MARK"])

    def bad(device: torch.device) -> str | None:
        mark.touch()
        time.sleep(1.0)  # until the innocent one has seen it
        os._exit(134)

    def innocent(device: torch.device) -> str | None:
        until = time.monotonic() + 30
        while not mark.exists() and time.monotonic() < until:
            time.sleep(0.02)
        if not (done := mark.with_suffix(".done")).exists():
            done.touch()
            os._exit(135)
        return None

    serve(made(bad, innocent), device, pipe)


def spoils(device: str, cores: int, pipe: Connection) -> None:
    """After the first two cases the device refuses their processes everything."""
    served: list[object] = []

    def serves(device: object) -> bool:
        served.append(device)
        return len(served) > 1 or os.environ["SELFTEST_SPOILT"] == "no"

    selftest_worker._device_serves = serves
    serve(made(wrong, fine), device, pipe)


def held_back(device: torch.device) -> str | None:
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return None if {signal.SIGTERM, signal.SIGINT} <= held else f"only {held} are held back"


def mixed_claims(device: str, cores: int, pipe: Connection) -> None:
    tests = made(fine, fine)
    serve(
        [*tests, SelfTest("op", "other", "case", "not today", fine), SelfTest("odd", "x", "-", None, None)],
        device,
        pipe,
    )


def breaks_off(device: str, cores: int, pipe: Connection) -> None:
    """As a process that is killed while it writes: a length, and less than that."""
    tests = made(fine)
    pipe.send(("ready", [(test.op, test.backend, test.case) for test in tests], {}, [0]))
    pipe.recv()
    os.write(pipe.fileno(), (100).to_bytes(4, "big") + b"half")
    os._exit(137)


def never_starts(device: str, cores: int, pipe: Connection) -> None:
    os._exit(1)


def outcomes(results: tuple[CaseResult, ...]) -> list[str]:
    return [item.outcome for item in results]


@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_one_bad_kernel_costs_one_case(processes) -> None:
    """Also where another ran at the same time, which is asked again, alone."""
    said: list[str] = []
    results = run_guarded("cpu", limit_s=200, case_limit_s=4, processes=processes, work=mixed, progress=said.append)
    assert outcomes(results) == ["passed", "failed", "failed", "passed", "failed", "passed"]
    assert [item.backend for item in results] == [f"kernel{i}" for i in range(6)]
    assert results[2].detail == "its process ended with exit code 134"
    assert results[4].detail == "no result after 4 s: it hangs"
    assert "6 cases to run; 0 are not claimed" in said[1]
    ended = [line for line in said if "  ok  " in line or "FAILED" in line]
    assert [line.split()[2].split("/")[0] for line in ended] == list("123456")
    assert all("/6 " in line for line in ended)
    assert sum("FAILED  op kernel1, case (0.0 s): y: 1 of 1 differ" in line for line in ended) == 1
    assert not [line for line in said if "once more" in line and "kernel3" in line]


def test_a_case_that_another_takes_along_is_asked_again_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SELFTEST_MARK", str(tmp_path / "mark"))
    said: list[str] = []
    results = run_guarded("cpu", limit_s=200, processes=2, work=takes_others_along, progress=said.append)
    assert outcomes(results) == ["failed", "passed"]
    assert any("kernel1" in line and "exit code 135; once more later, alone" in line for line in said)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_time_is_bounded_and_what_was_not_run_is_said(processes) -> None:
    started = time.monotonic()
    results = run_guarded("cpu", limit_s=12, case_limit_s=300, processes=processes, work=slow)
    assert time.monotonic() - started < 12 + 8  # what a busy machine takes to end processes
    assert outcomes(results) == ["passed", "not run", "not run" if processes == 1 else "passed"]
    assert results[1].detail.startswith("the time was up ")
    assert results[1].detail.endswith(" s after it began")
    assert processes > 1 or results[2].detail == "the time was up"


def test_time_that_was_up_before_anything_could_run_is_a_failure_to_start() -> None:
    (result,) = run_guarded("cpu", limit_s=60, started=time.monotonic() - 100, work=slow)
    assert (result.op, result.outcome) == ("selftest", "failed")
    assert result.detail.endswith("the time was up")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_what_is_known(number) -> None:
    def progress(line: str) -> None:
        if "kernel0" in line:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()

    handler = signal.getsignal(number)
    results = run_guarded("cpu", limit_s=200, case_limit_s=300, processes=1, work=slow, progress=progress)
    assert outcomes(results) == ["passed", "not run", "not run"]
    assert results[2].detail == f"stopped by {number.name}"
    assert signal.getsignal(number) is handler


def test_a_process_that_ends_in_the_middle_of_a_message_has_lost_its_case() -> None:
    (result,) = run_guarded("cpu", limit_s=100, processes=1, work=breaks_off)
    assert (result.outcome, result.detail) == ("failed", "its process ended with exit code 137")


def test_nobody_need_read_the_progress(capsys, monkeypatch) -> None:
    """The report is still made, and standard output stays its own."""
    show_progress("one")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        show_progress("two")
        monkeypatch.setattr(sys, "stderr", None)
        show_progress("three")
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            gone.close()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "one\n")


def test_a_spoilt_device_gets_a_fresh_process(monkeypatch) -> None:
    """And a case that leaves the device so has not passed."""
    monkeypatch.setenv("SELFTEST_SPOILT", "yes")
    results = run_guarded("cpu", limit_s=100, processes=1, work=spoils)
    assert [item.detail for item in results] == ["y: 1 of 1 differ", "the device serves its process no longer"]
    monkeypatch.setenv("SELFTEST_SPOILT", "no")
    assert outcomes(run_guarded("cpu", limit_s=100, processes=1, work=spoils)) == ["failed", "passed"]


def test_what_nobody_claims_needs_no_run() -> None:
    """And a process leaves to this one what `timeout` and Ctrl-C send to all: it would seem to have been ended by its case."""
    said: list[str] = []
    results = run_guarded("cpu", limit_s=100, processes=1, work=mixed_claims, progress=said.append)
    assert outcomes(results) == ["passed", "passed", "not claimed", "untested"]
    assert "2 cases to run; 2 are not claimed" in said[1]


def test_a_self_test_that_cannot_start_fails_after_two_tries() -> None:
    (result,) = run_guarded("cpu", limit_s=60, processes=1, work=never_starts)
    assert (result.op, result.outcome) == ("selftest", "failed")
    assert result.detail.endswith("no process starts: its process ended with exit code 1")


def test_the_most_telling_cases_come_first() -> None:
    """One of each backend, then the rest, each in the order of what training needs; what is not claimed is not there."""

    def test(op: str, backend: str, refusal: str | None = None) -> SelfTest:
        return SelfTest(op, backend, "case", refusal, fine)

    tests = [
        *(test("kernel", "target0"), test("attention", "triton"), test("attention", "triton")),
        *(test("gemm_nt", "torch"), test("gemm_nt", "triton", "not here"), test("gemm_nt", "triton")),
        *(
            test("quantize", "reference"),
            test("quantize", "triton"),
            test("quantize", "triton"),
            test("gemm_nt", "triton"),
        ),
        SelfTest("odd", "any", "-", None, None),
    ]
    assert in_order(tests) == [7, 3, 5, 1, 8, 9, 2, 0, 6]


SCRIPT = """
import sys
from unittest import mock
from primus_turbo_plugin import cli
from primus_turbo_plugin.diagnostics import doctor, selftest_guard
from tests.diagnostics import machines, test_selftest_guard

if __name__ == "__main__":
    examine = doctor.examine
    gpu = lambda *args: examine(*args, device=machines.device("gfx950"))
    run = selftest_guard._Pool.run
    def slow(pool):
        pool.torch_device, pool.work = "cpu", test_selftest_guard.slow
        return run(pool)
    with mock.patch.object(doctor, "examine", gpu), mock.patch.object(selftest_guard._Pool, "run", slow):
        sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("how", [pytest.param("limit", marks=pytest.mark.slow), "signal to all"])
def test_the_command_ends_in_time_with_a_partial_report(how, tmp_path) -> None:
    """Lines come while it runs, also in a pipe. Signals as `timeout` and Ctrl-C send them: to the self-test's processes too."""
    script = tmp_path / "doctor.py"
    script.write_text(SCRIPT)
    limit = 20 if how == "limit" else 300
    arguments = [sys.executable, str(script), "doctor", "--selftest", "--selftest-limit", str(limit)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(Path(__file__).parents[2])])}
    started, seen = time.monotonic(), []
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                seen.append((time.monotonic() - started, line))
                if how != "limit" and "kernel0" in line:
                    time.sleep(1)
                    break
            if how != "limit":
                os.killpg(process.pid, signal.SIGTERM)
            out, _ = process.communicate(timeout=limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert time.monotonic() - started < limit + 10  # this script imports torch before the command begins
    reason = "the time was up" if how == "limit" else "stopped by SIGTERM"
    table = out.split("Self-test\n")[1]
    assert "NOT RUN" in table
    assert f"not finished: op kernel1 case {reason}" in " ".join(table.split())
    assert "self-test: INCOMPLETE: " in table
    assert [line for at, line in seen if "ok" in line]


ORPHANS = """
import multiprocessing, os, signal, threading
from tests.diagnostics import test_selftest_guard
from primus_turbo_plugin.diagnostics.selftest_guard import run_guarded

def end():
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def progress(line):
    if "kernel0" in line:  # the next one hangs
        threading.Timer(1.0, end).start()

if __name__ == "__main__":
    run_guarded("cpu", limit_s=300, case_limit_s=300, processes=2, work=test_selftest_guard.slow, progress=progress)
"""


def test_processes_that_hang_end_with_a_command_that_is_killed(tmp_path) -> None:
    """They hold the GPU, and what else would end them is held back."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(["", str(Path(__file__).parents[2])])}
    said = tmp_path / "said"  # a pipe would be open for as long as they run
    with said.open("w") as out:
        done = subprocess.run([sys.executable, str(script)], stdout=out, stderr=out, env=environ, check=False)
    assert done.returncode == -signal.SIGKILL, said.read_text()
    left = {int(pid) for pid in said.read_text().splitlines()[-1].split()}
    assert left
    until = time.monotonic() + 20
    while left and time.monotonic() < until:
        left = {pid for pid in left if _runs(pid)}
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def _runs(pid: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody asks for counts as none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_the_real_one_passes_here() -> None:
    seen: list[str] = []
    results = run_guarded("cpu", limit_s=300, processes=2, progress=seen.append)
    assert {item.outcome for item in results} == {"passed", "not claimed"}
    assert "  1/" in next(line for line in seen if "  ok  " in line)
