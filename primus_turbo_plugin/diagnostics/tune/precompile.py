"""Compiles candidates in processes of their own: several at a time; a compiler that crashes or does not end takes only one along.

A worker launches each candidate once, so that the search finds it in Triton's cache. What fails there with an error fails again,
and is judged, in the search. What kills the worker, or does not end in time, has failed for good.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

C = TypeVar("C", bound=Hashable)
Launcher = Callable[[Any, Any], None]
"""Launches a candidate of a task: (task, config)."""

_RELEASE = None
"""Message: give the GPU memory back."""


class Workers:
    """So many processes that compile.

    Args:
        count: How many; 0 compiles nothing ahead.
        launch: What they do with a candidate; a function of a module, since processes are spawned.
        limit_s: Seconds a candidate may take.
    """

    def __init__(self, count: int, launch: Launcher, limit_s: float) -> None:
        self._launch, self._limit_s = launch, limit_s
        self._workers = [_Worker(launch) for _ in range(count)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()

    def compile(self, task: Any, configs: Sequence[C]) -> dict[C, str]:
        """Launches every candidate once; gives those that must not be tried in this process, with the reason."""
        waiting: queue.SimpleQueue[C] = queue.SimpleQueue()
        for config in configs:
            waiting.put(config)
        fatal: dict[C, str] = {}

        def serve(worker: _Worker) -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    config = waiting.get_nowait()
                    reason = worker.run(task, config, self._limit_s)
                    if reason is not None:
                        fatal[config] = reason
            worker.release()

        threads = [threading.Thread(target=serve, args=(worker,)) for worker in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return fatal


class _Worker:
    """One process, replaced when it dies."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._launch), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, task: Any, config: Any, limit_s: float) -> str | None:
        """None once the candidate was launched or has raised; else why the process is gone."""
        reason = None
        try:
            self._pipe.send((task, config))
            if self._pipe.poll(limit_s):
                self._pipe.recv()
            else:
                reason = f"failed: not compiled within {limit_s:g} s"
        except (EOFError, OSError):
            self._process.join(5.0)
            reason = f"failed: ended the process that compiled it (exit code {self._process.exitcode})"
        if reason is not None:
            self.stop()
            self._start()
        return reason

    def release(self) -> None:
        """Frees what the last task holds on the GPU."""
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(_RELEASE)
            self._pipe.recv()

    def stop(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, launch: Launcher) -> None:
    """A worker's life."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            message = pipe.recv()
            task, config = (None, None) if message is _RELEASE else message
            launch(task, config)
            pipe.send(True)


_cases: dict[Any, Any] = {}
"""In a worker: the case it works on."""


def launch_gemm(task: Any, config: Any) -> None:
    """Launches one candidate of a `GemmTask`; errors are the search's to judge. Without a task, frees the last one's memory."""
    import torch

    from primus_turbo_plugin.diagnostics.tune.gemm_case import GemmCase
    from primus_turbo_plugin.kernels.registry import default_registry

    if task not in _cases:
        _cases.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    if task is None:
        return
    with contextlib.suppress(torch.OutOfMemoryError):
        if task not in _cases:
            _cases[task] = GemmCase(task, default_registry(), sets=1)
        case = _cases[task]
        with contextlib.suppress(*case.errors):
            case.launch(config)
