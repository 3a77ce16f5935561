"""The self-test in processes of its own, so that a kernel that hangs or ends its process costs one case and not the report.

Several processes, because nearly all the time goes into compiling kernels, on the CPU. Each runs one case after another, as it is
given them, the most telling ones first (`selftest.in_order`). A fault of a GPU ends the process on ROCm, perhaps with those
beside it, and leaves one on NVIDIA in which nothing runs any more. So a case that loses its process while others run says nothing
yet: it is run once more at the end, alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from primus_turbo_plugin.diagnostics.selftest import CaseResult, Outcome
from primus_turbo_plugin.diagnostics.selftest_worker import run_cases, usable_cores

_CASE_LIMIT_S = 180.0
"""A case compiles a few kernels; the largest take some ten seconds each."""
_START_LIMIT_S = 120.0
"""Importing torch and listing the cases."""
_ENDING_S = 2.0
"""Kept of the limit for ending the processes and printing the report."""
_STOPPING = (signal.SIGTERM, signal.SIGINT)

Work = Callable[[str, int, Connection], None]


class Stopped(BaseException):
    """Somebody asked this process to end."""


def run_guarded(
    torch_device: str,
    *,
    limit_s: float,
    started: float | None = None,
    case_limit_s: float = _CASE_LIMIT_S,
    processes: int | None = None,
    work: Work | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[CaseResult, ...]:
    """Runs the self-test of the default registry on a device.

    Args:
        torch_device: `cuda` or `cpu`.
        limit_s: After so many seconds this returns; what has no result is `not run`. SIGTERM and SIGINT do the same at once.
        started: When these seconds began, by `time.monotonic`; now unless given.
        case_limit_s: After so many seconds a case has failed.
        processes: How many run at a time; by default as many as are of use here.
        work: What a process does, as `selftest_worker.run_cases`; another one in tests.
        progress: Is told in a line what begins, and how every case ended.
    """
    began = time.monotonic() if started is None else started
    pool = _Pool(
        torch_device=torch_device,
        began=began,
        deadline=began + max(limit_s - _ENDING_S, limit_s / 2),
        case_limit_s=case_limit_s,
        processes=processes or max(1, min(8, usable_cores() // 2)),
        work=work or run_cases,
        progress=progress or (lambda _: None),
    )
    pool.progress(f"self-test: {pool.processes} processes, {limit_s:.0f} s at most")
    try:
        with _stopped_by_signals():
            reason = pool.run()
    except Stopped as stop:
        reason = f"stopped by {stop}"
    finally:
        pool.end_processes()
    return pool.all_results(reason)


@dataclass(slots=True, eq=False)
class _Worker:
    """A process.

    Attributes:
        process, pipe: What it is, and how to talk to it.
        since: When it was started or was given its case.
        current: The number of its case; None while it has none.
        ready: Whether it has said what there is to run.
    """

    process: Any
    pipe: Connection
    since: float
    current: int | None = None
    ready: bool = False

    @property
    def is_idle(self) -> bool:
        return self.ready and self.current is None


@dataclass(slots=True, kw_only=True)
class _Pool:
    """A self-test under way.

    Attributes:
        torch_device, case_limit_s, processes, work, progress: As in `run_guarded`.
        began, deadline: By `time.monotonic`.
        names: Op, backend and case of everything there is, once a process has said it.
        results: By number.
        unneeded: Results that need no run.
        todo: Numbers of the cases that nobody has begun.
        again: Number -> what happened, of cases that lost their process while others were there.
        workers: The processes.
        lost_starts: Processes in a row that ended before they were ready.
        lost_start: What happened to the last of them.
    """

    torch_device: str
    began: float
    deadline: float
    case_limit_s: float
    processes: int
    work: Work
    progress: Callable[[str], None]
    names: list[tuple[str, str, str]] = field(default_factory=list)
    results: dict[int, CaseResult] = field(default_factory=dict)
    unneeded: int = 0
    todo: deque[int] = field(default_factory=deque)
    again: dict[int, str] = field(default_factory=dict)
    workers: list[_Worker] = field(default_factory=list)
    lost_starts: int = 0
    lost_start: str = ""

    def run(self) -> str:
        """Runs everything there is time for; why what is left has not been run."""
        while not self.names or self.todo or self.again or any(w.current is not None for w in self.workers):
            self._hire()
            if not self.workers:
                return f"no process starts: {self.lost_start}"
            self._give_out()
            if not self.workers:  # they have ended since
                continue
            waiting = [w for w in self.workers if not w.is_idle]
            until = min([self.deadline, *(self._patience_with(w) for w in waiting)])
            heard = wait([w.pipe for w in self.workers], max(until - time.monotonic(), 0.0))
            for worker in [w for w in self.workers if w.pipe in heard]:
                self._hear(worker)
            now = time.monotonic()
            if now >= self.deadline:
                return "the time was up"
            for worker in [w for w in waiting if w in self.workers and not w.is_idle and now >= self._patience_with(w)]:
                self._lose(worker, f"no result after {now - worker.since:.0f} s: it hangs")
        return ""

    def _patience_with(self, worker: _Worker) -> float:
        return worker.since + (self.case_limit_s if worker.ready else _START_LIMIT_S)

    def _hire(self) -> None:
        """As many processes as there is work for; none after two in a row that did not start."""
        wanted = self.processes
        if self.names:
            wanted = min(wanted, max(1, len(self.todo) + sum(w.current is not None for w in self.workers)))
        while len(self.workers) < wanted and self.lost_starts < 2:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            share = max(1, min(4, usable_cores() // self.processes))  # a container may have fewer than it seems
            process = context.Process(target=self.work, args=(self.torch_device, share, theirs), daemon=True)
            with _signals_held_back():
                process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours, time.monotonic()))

    def _give_out(self) -> None:
        """A case for everybody who is idle; when there are none left, those that are to run alone, one at a time."""
        for worker in [w for w in self.workers if w.is_idle]:
            alone = all(w.is_idle for w in self.workers)
            number = self.todo[0] if self.todo else next(iter(self.again), None) if alone else None
            if number is None:
                return
            try:
                worker.pipe.send(number)
            except OSError:  # it has ended since
                self._end(worker)
                continue
            if self.todo:
                self.todo.popleft()
            worker.current, worker.since = number, time.monotonic()

    def _hear(self, worker: _Worker) -> None:
        """What a process says."""
        try:
            kind, *said = worker.pipe.recv()
        except (EOFError, OSError):  # OSError: in the middle of a message, say
            worker.process.join(_ENDING_S)
            self._lose(worker, f"its process ended with exit code {worker.process.exitcode}")
            return
        if kind == "ready":
            worker.ready, self.lost_starts = True, 0
            if not self.names:
                self._learn(*said)
            return
        result, device_serves = said
        number, worker.current = worker.current, None
        assert number is not None
        self._ended(number, result)
        if not device_serves:
            self._end(worker)

    def _learn(self, names: list[tuple[str, str, str]], unneeded: dict[int, CaseResult], order: list[int]) -> None:
        self.names, self.todo, self.unneeded = names, deque(order), len(unneeded)
        self.results.update(unneeded)
        self._say(f"{len(order)} cases to run; {len(unneeded)} are not claimed, or untested")

    def _ended(self, number: int, result: CaseResult) -> None:
        self.again.pop(number, None)
        self.results[number] = result
        count = f"{len(self.results) - self.unneeded:3}/{len(self.names) - self.unneeded}"
        verdict = "ok    " if result.outcome == "passed" else "FAILED"
        detail = f": {result.detail}" if result.detail else ""
        case = f"{result.op} {result.backend}, {result.case} ({result.seconds:.1f} s)"
        self._say(f"{count}  {verdict}  {case}{detail}")

    def _lose(self, worker: _Worker, what: str) -> None:
        """A process is gone, or is ended here: its case has failed if nobody else was there, else it is run again."""
        number, seconds = worker.current, time.monotonic() - worker.since
        self._end(worker)
        if number is None and not worker.ready:
            self.lost_starts, self.lost_start = self.lost_starts + 1, what
        elif number is None:
            return
        elif number in self.again or not self.workers:
            self._ended(number, self._result(number, "failed", what, seconds))
        else:
            self.again[number] = what
            self._say(f"{', '.join(self.names[number])}: {what}; once more later, alone")

    def _end(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.process.kill()
        worker.process.join(_ENDING_S)
        worker.pipe.close()

    def end_processes(self) -> None:
        """Ends all; one that the driver of a hanging GPU holds back is left behind."""
        for worker in self.workers:
            worker.process.kill()
        until = time.monotonic() + _ENDING_S / 2
        for worker in self.workers:
            worker.process.join(max(0.0, until - time.monotonic()))

    def all_results(self, reason: str) -> tuple[CaseResult, ...]:
        """In the order of the list; what has no result has not been run, for this reason."""
        if not self.names:
            detail = f"no process became ready to run a case: {reason}"
            return (CaseResult(op="selftest", backend="-", case="start", outcome="failed", detail=detail),)
        for number, what in self.again.items():
            self.results[number] = self._result(number, "failed", f"{what}, while others ran", 0.0)
        for worker in self.workers:
            if worker.current is not None:
                seconds = time.monotonic() - worker.since
                detail = f"{reason} {seconds:.0f} s after it began"
                self.results.setdefault(worker.current, self._result(worker.current, "not run", detail, seconds))
        return tuple(self.results.get(i) or self._result(i, "not run", reason, 0.0) for i in range(len(self.names)))

    def _result(self, number: int, outcome: Outcome, detail: str, seconds: float) -> CaseResult:
        op, backend, case = self.names[number]
        return CaseResult(op=op, backend=backend, case=case, outcome=outcome, detail=detail, seconds=seconds)

    def _say(self, text: str) -> None:
        self.progress(f"{time.monotonic() - self.began:6.1f} s  {text}")


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise `Stopped` here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """A process started in here never gets them: what Ctrl-C or `timeout` sends to all is for this one to answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def show_progress(text: str) -> None:
    """A line at once, also into a pipe; beside the report, which is all of standard output. Nobody need read it."""
    if sys.stderr is not None:  # closed; print would take standard output
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def leave_stuck_processes(code: int) -> None:
    """Ends this process where one of its own cannot be ended: Python would wait for it for ever."""
    if multiprocessing.active_children():
        sys.stdout.flush()
        os._exit(code)
