"""The self-test in a process of its own, so that a kernel that hangs or ends its process costs one case and not the report.

A fault of a GPU ends the process on ROCm, and leaves one on NVIDIA in which nothing runs any more. Either way the next process
goes on with the next case.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from primus_turbo_plugin.diagnostics.selftest import CaseResult, Outcome, SelfTest, selftests
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
    run = _Run(torch_device, time.monotonic() + limit_s, case_limit_s, work or _work, progress or (lambda _: None))
    start = 0
    while not run.names or start < len(run.names):
        start = run.process_from(start)
    return tuple(run.results[i] for i in range(len(run.names)))


@dataclass(slots=True)
class _Run:
    """A self-test under way.

    Attributes:
        torch_device, case_limit_s, work, progress: As in `run_guarded`.
        deadline: When the time is up, by `time.monotonic`.
        names: Op, backend and case of everything there is to run, once the first process has said it.
        results: By number.
    """

    torch_device: str
    deadline: float
    case_limit_s: float
    work: Work
    progress: Callable[[str], None]
    names: list[tuple[str, str, str]] = field(default_factory=list)
    results: dict[int, CaseResult] = field(default_factory=dict)

    def process_from(self, start: int) -> int:
        """Runs cases from `start` on until all are done or the process ends; the number of the next one."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=self.work, args=(self.torch_device, start, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            return self._listen(ours, start)
        except EOFError:
            process.join()
            return self._failed(f"its process ended with exit code {process.exitcode}", start)
        finally:
            process.kill()
            process.join()

    def _listen(self, ours: Connection, start: int) -> int:
        """What the process says, until it is done; the number of the next case."""
        current, patience = start, _START_LIMIT_S
        while True:
            left = min(patience, self.deadline - time.monotonic())
            if left <= 0 or not ours.poll(left):
                if time.monotonic() >= self.deadline:
                    return self._times_up()
                return self._failed(f"no result after {patience:.0f} s: the kernel hangs", current)
            kind, *said = ours.recv()
            if kind == "names":
                self.names[:], patience = said[0], self.case_limit_s
            elif kind == "begins":
                current = said[0]
                op, backend, _ = self.names[current]
                self.progress(f"{current + 1} of {len(self.names)}: {op} {backend}")
            elif kind == "ended":
                self.results[said[0]] = said[1]
                current = said[0] + 1
            else:  # "done", or "poisoned": the device serves this process no longer
                return current

    def _failed(self, detail: str, current: int) -> int:
        """The first case without a result has failed; the number of the next one."""
        self._name_something()
        missing = [i for i in range(current, len(self.names)) if i not in self.results]
        if not missing:  # it ended after the last case
            return len(self.names)
        self.results[missing[0]] = self._result(missing[0], "failed", detail)
        return missing[0] + 1

    def _times_up(self) -> int:
        """What has no result has not been run; the number of cases."""
        self._name_something()
        for i in range(len(self.names)):
            if i not in self.results:
                self.results[i] = self._result(i, "not run", "the time was up")
        return len(self.names)

    def _name_something(self) -> None:
        """So that a self-test that ended before it could say what there is to run has a row."""
        if not self.names:
            self.names.append(("selftest", "-", "start"))

    def _result(self, index: int, outcome: Outcome, detail: str) -> CaseResult:
        op, backend, case = self.names[index]
        return CaseResult(op=op, backend=backend, case=case, outcome=outcome, detail=detail)


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
