"""Host time of a call: how long Python and the launches take until a call returns, whatever the GPU then has to do.

    python -m benchmarks.host_time [--only layer linear ...] [--recipes bf16 mxfp4] [--json rows.jsonl]
    python -m benchmarks.host_time --profile "linear fwd+bwd primus_turbo mxfp4"

Sizes are small, the GPU is idle when a call begins, and the clock stops when the call returns; "done" is when the GPU is. Where
both are far apart, the GPU was the slower one and the case is too large. Weights are quantised at the first call and kept, as in
the later microbatches of a step; `--first-microbatch` quantises them in every call. Megatron's linears leave weight gradients in
.grad, this package's add them to main_grad. `--profile` shows whose time it is, of the cases whose op and backend contain the
words: own time first, with the profiler's overhead in it. On a CPU the reference kernels compute inside the call, and the times
say nothing of a GPU's.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import platform
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._host_cases import Case, Setting, Sizes, every_case
from benchmarks._timing import Timed, machine

WARM_UP = 5
SAMPLES = 41
_LEAST_SNR_DB = 8.0
"""Products of operands in FP4, rotated or not: 11 to 16 dB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(Timed):
    """One measured case: times until the call returned; `ok` is the signal to difference from the op's first backend.

    Attributes:
        us_done: Median time until the GPU was done as well.
    """

    us_done: float

    def text(self, baseline_us: float) -> str:
        return (
            f"{self.op:27} {self.backend:44} {self.us:8.1f} [{self.us_p20:8.1f} {self.us_p80:8.1f}] {self.us_done:8.1f} "
            f"{self.us / baseline_us:6.2f}x  {self.ok}"
        )


HEADER = f"{'op':27} {'backend':44} {'us':>8} [{'p20':>8} {'p80':>8}] {'done':>8} {'time':>7}  ok"


def host_time(
    call: Callable[[], Any], device: torch.device, samples: int = SAMPLES, before: Callable[[], None] = lambda: None
) -> tuple[float, float, float, float]:
    """(median, 20th, 80th percentile) until the call returns and the median until the device is done, in microseconds."""
    for _ in range(WARM_UP):
        before()
        call()
    times, until_done = [], []
    for _ in range(samples):
        before()
        _wait(device)
        start = time.perf_counter_ns()
        call()
        returned = time.perf_counter_ns()
        _wait(device)
        until_done.append((time.perf_counter_ns() - start) / 1e3)
        times.append((returned - start) / 1e3)
    times.sort()
    return times[samples // 2], times[samples // 5], times[samples * 4 // 5], sorted(until_done)[samples // 2]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def rows(
    setting: Setting, only: list[str] | None = None, *, samples: int = SAMPLES, first_microbatch: bool = False
) -> Iterator[Row]:
    """A row a case, each compared with the first backend of its op; one that cannot be had says why."""
    wanted: dict[str, Tensor] = {}
    s = setting.sizes
    for case in every_case(setting):
        if only and not any(_is_meant(case, words) for words in only):
            continue
        times, ok = (float("nan"),) * 4, "-"
        try:
            _announce_step(case.modules)
            if case.result is not None:
                result = case.result().detach().clone()
                ok = _compared(result, wanted.setdefault(case.op, result))
            times = host_time(case.call, setting.device, samples, lambda case=case: prepare(case, first_microbatch))
        except RuntimeError as error:  # a graph that cannot be captured, say
            ok = f"cannot: {str(error).splitlines()[0][:100]}"
        yield Row(
            op=case.op, backend=case.backend, shape=f"{s.tokens}x{s.hidden}x{s.ffn}", us=times[0], us_p20=times[1],
            us_p80=times[2], us_done=times[3], ok=ok,
        )  # fmt: skip


def prepare(case: Case, first_microbatch: bool = False) -> None:
    """What happens between two steps of training, and is not timed: gradients are dropped, quantised weights made stale."""
    for leaf in case.leaves:
        leaf.grad = None
    if first_microbatch:
        _announce_step(case.modules)


def _announce_step(modules: tuple[Any, ...]) -> None:
    """As Megatron's schedules announce one: copies of weights are made at the next forward, and kept."""
    for module in modules:
        for part in module.modules():
            if hasattr(part, "is_first_microbatch"):
                part.is_first_microbatch = True


def _compared(got: Tensor, want: Tensor) -> str:
    if got is want:
        return "reference"
    error = (got.double() - want.double()).square().sum()
    snr = float(10 * torch.log10(want.double().square().sum() / error.clamp_min(1e-300)))
    return f"{min(snr, 999):.0f} dB" if snr >= _LEAST_SNR_DB else f"WRONG: {snr:.0f} dB"


def _is_meant(case: Case, words: str) -> bool:
    return words.lower() in f"{case.op} {case.backend}".lower()


def profile(setting: Setting, words: str, *, samples: int = SAMPLES, first_microbatch: bool = False) -> Iterator[str]:
    """For each case whose op and backend contain the words: where its time goes, a line a function, the largest own time first.

    Autograd runs the backward pass in this thread meanwhile, where the profiler sees it.
    """
    for case in every_case(setting):
        if not _is_meant(case, words):
            continue
        _announce_step(case.modules)
        found = cProfile.Profile()
        with torch.autograd.set_multithreading_enabled(False):
            host_time(case.call, setting.device, 1, lambda case=case: prepare(case, first_microbatch))
            for _ in range(samples):
                prepare(case, first_microbatch)
                _wait(setting.device)
                found.runcall(case.call)
        yield f"\n{case.op}, {case.backend}: microseconds a call, the profiler's own included"
        yield f"{'own':>8} {'total':>8} {'calls':>7}  function"
        stats: Any = pstats.Stats(found)
        ordered = sorted(stats.stats.items(), key=lambda item: -item[1][2])
        for (file, line, name), (_, calls, own, total, _) in ordered[:30]:
            where = f"{'/'.join(file.split(os.sep)[-3:])}:{line} " if line else ""
            yield f"{own / samples * 1e6:8.1f} {total / samples * 1e6:8.1f} {calls / samples:7.1f}  {where}{name}"


def describe(device: torch.device, samples: int) -> str:
    """Device, versions, commit and calls a case: the first line of a report."""
    if device.type != "cpu":
        return f"{machine()}, host time, idle GPU, median of {samples} calls"
    return (
        f"CPU ({platform.machine()}), torch {torch.__version__}, reference kernels, median of {samples} calls: a CPU's times, "
        "with the computing in them; they say nothing of a GPU's"
    )


def start(device: torch.device) -> None:
    """Megatron's process groups of one rank, and random states that a graph may capture."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=device.type != "cpu")


@contextlib.contextmanager
def _megatron_here(device: torch.device) -> Iterator[None]:
    from primus_turbo_plugin.training.cpu_device import megatron_on_cpu

    with megatron_on_cpu() if device.type == "cpu" else contextlib.nullcontext():
        start(device)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="cases whose op and backend contain any of these")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "mxfp8", "mxfp4"])
    parser.add_argument("--first-microbatch", action="store_true", help="quantise the weights in every call")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calls a case")
    parser.add_argument("--profile", metavar="WORDS", help="profile these cases instead of timing all")
    parser.add_argument("--json", metavar="FILE", help="append the rows to this JSON lines file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(device, Sizes(), tuple(options.recipes))
    kept = {"samples": options.samples, "first_microbatch": options.first_microbatch}
    with _megatron_here(device):
        print(describe(device, options.samples), flush=True)
        if options.profile is not None:
            for line in profile(setting, options.profile, **kept):
                print(line, flush=True)
            return
        print(HEADER, flush=True)
        baselines: dict[str, float] = {}
        for row in rows(setting, options.only, **kept):
            print(row.text(baselines.setdefault(row.op, row.us)), flush=True)
            if options.json:
                with open(options.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
