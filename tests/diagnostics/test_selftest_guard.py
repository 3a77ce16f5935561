"""The guarded self-test: a kernel that hangs, ends its process or spoils the device costs one case and is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from primus_turbo_plugin.diagnostics import selftest_guard
from primus_turbo_plugin.diagnostics.selftest import CaseResult, SelfTest
from primus_turbo_plugin.diagnostics.selftest_guard import run_guarded, send_results

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


def mixed(device: str, start: int, out: Connection) -> None:
    send_results(made(fine, wrong, ends, fine, hangs, fine), device, start, out)


def slow(device: str, start: int, out: Connection) -> None:
    send_results(made(fine, hangs, fine), device, start, out)


def spoils(device: str, start: int, out: Connection) -> None:
    """After the second case the device refuses this process everything."""
    selftest_guard._device_serves = lambda device: bool(start)
    send_results(made(wrong, fine, fine), device, start, out)


def never_starts(device: str, start: int, out: Connection) -> None:
    os._exit(1)


def outcomes(results: tuple[CaseResult, ...]) -> list[str]:
    return [item.outcome for item in results]


def test_one_bad_kernel_costs_one_case() -> None:
    results = run_guarded("cpu", limit_s=100, case_limit_s=5, work=mixed)
    assert outcomes(results) == ["passed", "failed", "failed", "passed", "failed", "passed"]
    assert [item.backend for item in results] == [f"kernel{i}" for i in range(6)]
    assert results[2].detail == "its process ended with exit code 134"
    assert results[4].detail == "no result after 5 s: the kernel hangs"


def test_the_time_is_bounded_and_what_was_not_run_is_said() -> None:
    def progress(text: str) -> None:
        if text.startswith("2 of 3"):  # however long the start took, the time is up a second into the second case
            run.deadline = time.monotonic() + 1

    run = selftest_guard._Run("cpu", time.monotonic() + 300, 300, slow, progress)
    assert run.process_from(0) == 3
    assert [run.results[i].outcome for i in range(3)] == ["passed", "not run", "not run"]
    assert run.results[1].detail == "the time was up"


def test_a_spoilt_device_gets_a_fresh_process() -> None:
    assert outcomes(run_guarded("cpu", limit_s=100, work=spoils)) == ["failed", "passed", "passed"]


def test_a_self_test_that_cannot_start_fails() -> None:
    (result,) = run_guarded("cpu", limit_s=60, work=never_starts)
    assert (result.op, result.outcome) == ("selftest", "failed")


@pytest.mark.slow
def test_the_real_one_passes_here() -> None:
    seen: list[str] = []
    results = run_guarded("cpu", limit_s=300, progress=seen.append)
    assert {item.outcome for item in results} == {"passed", "not claimed"}
    assert seen[0].startswith("1 of ")
