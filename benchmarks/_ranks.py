"""What benchmarks over several ranks share: start-up, a clock that all ranks agree on, and rows of a table."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

# NVLink multicast off, before NCCL is loaded: hosts whose fabric manager forbids it hang in it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist

WARM_UP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Of one variant: times of a call in ms on the slowest rank, and the host's time to enqueue it in us."""

    ms: float
    p20: float
    p80: float
    host_us: float


@dataclass(kw_only=True, slots=True)
class Row:
    """One variant on one shape: `hidden` is the share of the collective that lay under the GEMM, `ok` what the check found."""

    kind: str
    shape: str
    variant: str
    timing: Timing | None
    speedup: float | None = None
    hidden: float | None = None
    ok: str = ""

    def text(self) -> str:
        if self.timing is None:
            return f"  {self.variant:34s} {self.ok}"
        t = self.timing
        speedup = f"{self.speedup:6.2f}x" if self.speedup else " " * 7
        hidden = f"{self.hidden:6.2f}" if self.hidden is not None else " " * 6
        times = f"{t.ms:8.3f} [{t.p20:7.3f} {t.p80:7.3f}]"
        return f"  {self.variant:34s}{times} {speedup} hidden {hidden}  host {t.host_us:5.0f} us  {self.ok}"

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Ranks:
    """This process among the others.

    Args:
        device: `cuda` (one GPU a rank; ranks share one where there are fewer) or `cpu`.
        budget_s: When to stop; a watchdog ends the process a little later, since a GPU wait cannot be interrupted.
    """

    def __init__(self, device: str, budget_s: float) -> None:
        self.start, self.budget_s = time.monotonic(), budget_s
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        threading.Thread(target=self._watch, daemon=True).start()
        self.shares_gpu = False
        if device == "cuda":
            self.shares_gpu = torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
            self.device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" and not self.shares_gpu else "gloo"
        bound = {"device_id": self.device} if backend != "gloo" else {}
        dist.init_process_group(backend, timeout=timedelta(seconds=120), **bound)
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=120))
        self.group = dist.group.WORLD
        if device == "cuda":
            torch.cuda.set_stream(
                torch.cuda.Stream(self.device)
            )  # waits on values need a stream that is not the default

    def _watch(self) -> None:
        time.sleep(self.budget_s + 20)
        print(f"[rank {os.environ.get('RANK')}] out of time: stopped by the watchdog", flush=True)
        os._exit(3)

    def say(self, *words: Any) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def enough_time(self, seconds: float) -> bool:
        """Rank 0 decides for all."""
        answer = [self.budget_s - (time.monotonic() - self.start) > seconds]
        dist.broadcast_object_list(answer, src=0, group=self.control)
        return answer[0]

    def agree(self, problem: str) -> str:
        """The first rank's problem, on every rank; empty if there is none."""
        told = [""] * self.size
        dist.all_gather_object(told, problem, group=self.control)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, call: Callable[[], object], iterations: int) -> Timing:
        """Back-to-back calls, each between two events; the slowest rank's median."""
        for _ in range(WARM_UP):
            call()
        self.synchronize()
        dist.barrier(group=self.control)
        times, host = (self._on_gpu if self.device.type == "cuda" else self._on_cpu)(call, iterations)
        own = (statistics.median(times), *(sorted(times)[int(q * len(times))] for q in (0.2, 0.8)), host)
        told: list[tuple[float, ...]] = [()] * self.size
        dist.all_gather_object(told, own, group=self.control)
        slowest = max(told)
        return Timing(ms=slowest[0], p20=slowest[1], p80=slowest[2], host_us=max(t[3] for t in told))

    def _on_gpu(self, call: Callable[[], object], iterations: int) -> tuple[list[float], float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
        begin = time.perf_counter()
        for first, last in events:
            first.record()
            call()
            last.record()
        host = (time.perf_counter() - begin) / iterations * 1e6
        self.synchronize()
        return [first.elapsed_time(last) for first, last in events], host

    @staticmethod
    def _on_cpu(call: Callable[[], object], iterations: int) -> tuple[list[float], float]:
        times = []
        for _ in range(iterations):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
        return times, statistics.mean(times) * 1e3


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """|value - reference| / |reference|; infinite where a value is not finite."""
    value, reference = value.float(), reference.float()
    if not bool(torch.isfinite(value).all()):
        return float("inf")
    return float((value - reference).norm() / reference.norm().clamp_min(1e-20))


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")
