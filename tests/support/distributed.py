"""Tests in real processes: `@ranks(world_size=[1, 2])` runs the body once in each of so many processes.

Processes are forked from a server that has imported torch and Megatron but never computed anything, so that starting four
of them takes a fraction of a second, no thread pool is inherited, and nothing leaks from one test into the next. They meet
through a file (no port to clash), talk gloo, run one thread each, and are ended at a time limit. The first rank to fail
is the one reported.

    @ranks(world_size=[1, 2, 4])
    @pytest.mark.parametrize("rows", [1, 33])
    def test_all_gather_keeps_rank_order(rank_info: RankInfo, rows: int) -> None:
        ...

Everything but `rank_info` is a pytest argument (fixture or parameter) and is pickled to the processes; fixtures must
therefore give plain values (`tmp_path` does). Under `megatron=True` the body runs inside `megatron_on_cpu()`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import seeds

_PRELOAD = ["torch", "torch.distributed"]
_HAS_GPU = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd"))
if not _HAS_GPU:  # Megatron asks for the number of GPUs as it is imported, after which no fork may use one
    _PRELOAD.append("tests.support.preload")
_GRACE_S = 3.0  # how long the other ranks may go on after the first failure, to show theirs


@dataclass(frozen=True)
class RankInfo:
    """Who this process is.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: Number of processes.
        seed: The same on all ranks: fresh in every run, derived from the test's name.
    """

    rank: int
    world_size: int
    seed: int


def ranks(*, world_size: int | Sequence[int], timeout_s: float = 120.0, megatron: bool = False) -> Callable[..., Any]:
    """Turns a function of `(rank_info, **arguments)` into a pytest test that runs it in `world_size` processes."""
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            size = arguments.pop("world_size")
            request = arguments.pop("request")
            run_ranks(
                body.__module__,
                body.__qualname__,
                size,
                arguments,
                seed=seeds.case_seed(request.node.nodeid),
                timeout_s=timeout_s,
                megatron=megatron,
            )

        own = inspect.signature(body)
        if "rank_info" not in own.parameters:
            raise TypeError(f"{body.__qualname__}: the body of a @ranks test takes `rank_info`, got {own}")
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [p.replace(kind=keyword) for name, p in own.parameters.items() if name != "rank_info"]
        parameters += [inspect.Parameter(name, keyword) for name in ("world_size", "request")]
        test.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        test._ranks_body = body  # type: ignore[attr-defined]
        del test.__wrapped__  # pytest would look through it and ask for `rank_info` as a fixture
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate


def run_ranks(
    module: str,
    qualname: str,
    world_size: int,
    arguments: dict[str, Any],
    *,
    seed: int,
    timeout_s: float,
    megatron: bool,
) -> None:
    """Runs `module.qualname`'s body on every rank; fails or skips the running test as the first rank to end badly did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="turbo-ranks-") as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            info = RankInfo(rank=rank, world_size=world_size, seed=seed)
            process = context.Process(
                target=_rank_main, args=(module, qualname, info, arguments, store, send, megatron), daemon=True
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            verdicts = _collect(pipes, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    _judge(verdicts, world_size, timeout_s)


def _collect(pipes: list[Any], timeout_s: float) -> dict[int, tuple[str, str]]:
    """Waits for one verdict a rank, in order of arrival; stops soon after the first bad one or at the time limit."""
    deadline = time.monotonic() + timeout_s
    verdicts: dict[int, tuple[str, str]] = {}
    waiting = dict(enumerate(pipes))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in multiprocessing.connection.wait(list(waiting.values()), timeout=left):
            rank = next(r for r, pipe in waiting.items() if pipe is ready)
            try:
                verdicts[rank] = ready.recv()  # type: ignore[union-attr]
            except EOFError:
                verdicts[rank] = ("died", "the process ended without a word (killed, or a crash in native code)")
            del waiting[rank]
            if verdicts[rank][0] != "passed":
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return verdicts


def _judge(verdicts: dict[int, tuple[str, str]], world_size: int, timeout_s: float) -> None:
    for rank, (kind, text) in verdicts.items():
        if kind not in ("passed", "skipped"):
            pytest.fail(f"rank {rank} of {world_size} {kind}:\n{text}", pytrace=False)
    skips = [text for kind, text in verdicts.values() if kind == "skipped"]
    if len(skips) == world_size:
        pytest.skip(skips[0])
    if skips:
        pytest.fail(f"{len(skips)} of {world_size} ranks skipped, the others did not: {skips[0]}", pytrace=False)
    missing = sorted(set(range(world_size)) - set(verdicts))
    if missing:
        pytest.fail(f"ranks {missing} of {world_size} did not end within {timeout_s} s", pytrace=False)


def _rank_main(
    module: str,
    qualname: str,
    info: RankInfo,
    arguments: dict[str, Any],
    store: str,
    verdict: Any,
    megatron: bool,
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(info.rank), WORLD_SIZE=str(info.world_size), LOCAL_RANK=str(info.rank))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        body = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))._ranks_body
        with contextlib.ExitStack() as stack:
            if megatron:
                from primus_turbo_plugin.training.cpu_device import megatron_on_cpu

                stack.enter_context(megatron_on_cpu())
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=info.rank, world_size=info.world_size)
            torch.manual_seed(info.seed)
            body(info, **arguments)
            dist.barrier()
        verdict.send(("passed", ""))
    except pytest.skip.Exception as skipped:
        verdict.send(("skipped", str(skipped)))
    except BaseException:
        verdict.send(("failed", traceback.format_exc()))
    finally:
        verdict.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # No interpreter shutdown: gloo's threads and half-finished collectives of a failed test must not delay the rest.
        os._exit(0)
