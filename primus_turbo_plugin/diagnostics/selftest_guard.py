"""The self-test in a process of its own, so that a kernel that hangs or ends its process costs one case and not the report.

A fault of a GPU ends the process on ROCm, and leaves one on NVIDIA in which nothing runs any more. Either way the next process
goes on with the next case.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from primus_turbo_plugin.diagnostics.selftest import CaseResult, SelfTest, selftests
from primus_turbo_plugin.kernels.registry import default_registry

_CASE_LIMIT_S = 180.0
"""A case compiles a few kernels; the largest take some ten seconds each."""
_START_LIMIT_S = 120.0
"""Importing torch and listing the cases."""

Work = Callable[[str, int, Connection], None]


def run_guarded(
    torch_device: str,
    *,
    limit_s: float,
    case_limit_s: float = _CASE_LIMIT_S,
    work: Work | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[CaseResult, ...]:
    """Runs the self-test of the default registry on a device.

    Args:
        torch_device: `cuda` or `cpu`.
        limit_s: After so many seconds what has not been run is reported as `not run`.
        case_limit_s: After so many seconds a case has failed.
        work: Runs tests from a number on and sends what it does; another one in tests.
        progress: Is told what is being run.
    """
    results: dict[int, CaseResult] = {}
    deadline = time.monotonic() + limit_s
    names: list[tuple[str, str, str]] = []
    start = 0
    while True:
        start = _one_process(
            torch_device, start, results, names, deadline, case_limit_s, work or _work, progress or (lambda _: None)
        )
        if names and start >= len(names):
            break
    return tuple(results[i] for i in range(len(names)))


def _one_process(
    torch_device: str,
    start: int,
    results: dict[int, CaseResult],
    names: list[tuple[str, str, str]],
    deadline: float,
    case_limit_s: float,
    work: Work,
    progress: Callable[[str], None],
) -> int:
    """Runs cases from `start` on until all are done or the process ends; the number of the next one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(torch_device, start, theirs), daemon=True)
    process.start()
    theirs.close()
    current, patience = start, _START_LIMIT_S
    try:
        while True:
            left = min(patience, deadline - time.monotonic())
            if left <= 0 or not ours.poll(left):
                if time.monotonic() >= deadline:
                    return _times_up(names, results)
                results[current] = _failed(names, current, f"no result after {patience:.0f} s: the kernel hangs")
                return current + 1
            kind, *said = ours.recv()
            if kind == "names":
                names[:], patience = said[0], case_limit_s
            elif kind == "begins":
                current = said[0]
                progress(f"{current + 1} of {len(names)}: {names[current][0]} {names[current][1]}")
            elif kind == "ended":
                results[said[0]] = said[1]
                current = said[0] + 1
            else:  # "done", or "poisoned": the device serves this process no longer
                return current
    except EOFError:
        process.join()
        results[current] = _failed(names, current, f"its process ended with exit code {process.exitcode}")
        return current + 1
    finally:
        process.kill()
        process.join()


def _failed(names: list[tuple[str, str, str]], index: int, detail: str) -> CaseResult:
    if not names:  # it ended before it could say what there is to run
        names.append(("selftest", "-", "start"))
    op, backend, case = names[index]
    return CaseResult(op=op, backend=backend, case=case, outcome="failed", detail=detail)


def _times_up(names: list[tuple[str, str, str]], results: dict[int, CaseResult]) -> int:
    """Marks what has not been run; the number of cases."""
    if not names:
        names.append(("selftest", "-", "start"))
    for i, (op, backend, case) in enumerate(names):
        if i not in results:
            results[i] = CaseResult(op=op, backend=backend, case=case, outcome="not run", detail="the time was up")
    return len(names)


def _work(torch_device: str, start: int, out: Connection) -> None:
    """In the process: everything from `start` on."""
    send_results(selftests(default_registry(), torch_device), torch_device, start, out)


def send_results(tests: Any, torch_device: str, start: int, out: Connection) -> None:
    """Runs tests and tells the other side what begins and how it ended."""
    device = torch.device(torch_device)
    out.send(("names", [(test.op, test.backend, test.case) for test in tests]))
    for i in range(start, len(tests)):
        test: SelfTest = tests[i]
        out.send(("begins", i))
        out.send(("ended", i, test.run(device)))
        if not _device_serves(device):
            out.send(("poisoned",))
            return
    out.send(("done",))


def _device_serves(device: torch.device) -> bool:
    """Whether the device still runs what it is given: after a fault on NVIDIA it refuses this process everything."""
    if device.type == "cpu":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def show_progress(text: str) -> None:
    """One line on a terminal, overwritten; nothing in a file."""
    if sys.stderr.isatty():
        print(f"\r\x1b[Kself-test {text}", end="", file=sys.stderr, flush=True)
