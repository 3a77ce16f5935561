"""Runs one function in N local processes: a small `torchrun` for one machine and gloo, with one clear error.

Processes are forked from a server that has imported torch and Megatron but computed nothing, so four of them start in a
fraction of the time of four interpreters. They meet through a file (no port to clash) and end when the parent does. The
first rank to fail decides the error; the others, whose collectives can only hang or break after that, are stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_turbo_plugin.errors import TurboError

_PRELOAD = ["torch", "torch.distributed", "primus_turbo_plugin.training.preload"]
_GRACE_S = 3.0  # after the first failure: how long the others may still say what they saw
STORE_VARIABLE = "TURBO_RENDEZVOUS_FILE"  # set by us for our own children only


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    Attributes:
        rank: Which one.
        message: The error in one line (expected mistakes) or its last line.
        trace: The full traceback.
        time_s: Wall clock at the failure, to tell the first from those that followed.
        expected: A mistake in the input, for which the message says all; otherwise the traceback matters.
    """

    rank: int
    message: str
    trace: str
    time_s: float
    expected: bool


class RanksFailed(TurboError):
    """At least one process failed; `failure` is the first."""

    def __init__(self, failure: Failure, world_size: int) -> None:
        self.failure, self.world_size = failure, world_size
        super().__init__(failure, world_size)

    def __str__(self) -> str:
        """Which rank, and why."""
        return f"rank {self.failure.rank} of {self.world_size}: {self.failure.message}"

    def add(self, sentence: str) -> None:
        """Lengthen the message: what only the caller knows."""
        self.failure = dataclasses.replace(self.failure, message=f"{self.failure.message} {sentence}")


class Ranks:
    """N running processes."""

    def __init__(self, processes: list[Any], pipes: list[Any], store: tempfile.TemporaryDirectory[str]) -> None:
        self._processes, self._store = processes, store
        self._waiting = dict(enumerate(pipes))
        self._failures: list[Failure] = []
        self._give_up_s: float | None = None

    def poll(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for news; whether all ranks ended well.

        Raises:
            RanksFailed: A rank failed; by then all are stopped.
        """
        for ready in multiprocessing.connection.wait(list(self._waiting.values()), timeout=timeout_s):
            rank = next(r for r, pipe in self._waiting.items() if pipe is ready)
            self._hear(rank, self._waiting.pop(rank))
        if self._failures and (not self._waiting or time.monotonic() > (self._give_up_s or 0.0)):
            self.stop()
            raise RanksFailed(min(self._failures, key=lambda f: f.time_s), len(self._processes))
        if not self._waiting:
            self.stop()
            return True
        return False

    def _hear(self, rank: int, pipe: Any) -> None:
        try:
            failure: Failure | None = pipe.recv()
        except EOFError:
            message = "the process ended without a word (killed, out of memory, or a crash in native code)"
            failure = Failure(rank, message, message, time.time(), expected=False)
        if failure is not None:
            self._failures.append(failure)
            self._give_up_s = self._give_up_s or time.monotonic() + _GRACE_S

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            RanksFailed: A rank failed.
        """
        while not self.poll(timeout_s=0.5):
            pass

    def stop(self) -> None:
        """Kill what still runs and clean up. Harmless when called again."""
        for process in self._processes:
            if process.is_alive() and self._waiting:
                process.kill()
        for process in self._processes:
            process.join()
        self._store.cleanup()


@contextlib.contextmanager
def start_ranks(
    target: str, argv: Sequence[str], world_size: int, *, logs: Path | None = None, threads: int | None = None
) -> Iterator[Ranks]:
    """Start `target(argv)` in `world_size` processes; on leaving the block none is left running.

    Args:
        target: `"module:function"`, called with `argv` in every process, RANK, WORLD_SIZE and LOCAL_RANK set.
        argv: Command-line arguments.
        world_size: How many processes.
        logs: Folder for `rank<r>.log` with each process's output; `None`: they share our output.
        threads: torch threads a process; default: the machine's cores divided among them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = tempfile.TemporaryDirectory(prefix="turbo-ranks-")
    threads = threads or max(1, available_cores() // world_size)
    pipes, processes = [], []
    for rank in range(world_size):
        receive, send = context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            STORE_VARIABLE: str(Path(store.name) / "store"),
        }
        log = None if logs is None else str(logs / f"rank{rank}.log")
        process = context.Process(target=_rank_main, args=(target, list(argv), environment, log, threads, send))
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    ranks = Ranks(processes, pipes, store)
    try:
        yield ranks
    finally:
        ranks.stop()


def available_cores() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _rank_main(
    target: str, argv: list[str], environment: dict[str, str], log: str | None, threads: int, verdict: Any
) -> None:
    import torch

    _end_with_parent()
    # Megatron's data loaders hand their workers a local function, which only forking passes on.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    if log is not None:
        _redirect_output(log)
    failure: Failure | None = None
    try:
        module, _, function = target.partition(":")
        main: Callable[[list[str]], Any] = getattr(importlib.import_module(module), function)
        main(argv)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            failure = _failure(f"ended with exit code {ended.code}", expected=isinstance(ended.code, str))
    except TurboError as error:
        failure = _failure(str(error), expected=True)
    except BaseException as error:
        failure = _failure(f"{type(error).__name__}: {error}", expected=False)
    if failure is not None and log is not None:
        print(failure.trace, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    verdict.send(failure)
    verdict.close()
    # No interpreter shutdown: gloo's threads and half-finished collectives of a failed run must not delay the end.
    os._exit(0 if failure is None else 1)


def _failure(message: str, *, expected: bool) -> Failure:
    return Failure(int(os.environ["RANK"]), message, traceback.format_exc(), time.time(), expected)


def _redirect_output(log: str) -> None:
    """Both outputs of this process, native code included, into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()

    def watch() -> None:
        assert parent is not None
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
