"""Speed of the reference kernels (torch), by default on one CPU thread: what a CPU run, a test or a self-test pays for.

    python benchmarks/reference_quantize.py [--rows 2048] [--cols 512] [--device cpu] [--threads 1] [--runs 15]

One row a case: `op  case | median us [p20 p80] | GB/s of fp32 elements read | ok`. `ok` is a numeric check made before timing.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from primus_turbo_plugin.kernels.reference.gemm import gemm_nt
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rounding import RoundingKey

_KEY = RoundingKey(seed=1, draw=2, tensor=3, rank=0)
_SPECS = (
    QuantSpec(format=Format.MXFP4),
    QuantSpec(format=Format.MXFP4, block="32x32"),
    QuantSpec(format=Format.MXFP4, hadamard=16),
    QuantSpec(format=Format.MXFP4, rounding="stochastic"),
    QuantSpec(format=Format.MXFP8),
    QuantSpec(format=Format.FP8),
    QuantSpec(format=Format.FP8, block="rowwise"),
    QuantSpec(format=Format.FP8, block="128x128"),
)
Case = tuple[str, Callable[[], object], bool]


def cases(rows: int, cols: int, device: str) -> Iterator[Case]:
    """(name, what is timed, whether its result is right)."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, cols, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    for spec in _SPECS:
        for columnwise in (False, True):
            q = quantize(x, spec, columnwise=columnwise, key=_KEY)
            source = (x.t() if columnwise else x).float()
            ok = bool((q.dequantize() - source).norm() < 0.25 * source.norm())
            name = f"quantize {spec} {'columnwise' if columnwise else 'rowwise'}"
            yield name, lambda spec=spec, c=columnwise: quantize(x, spec, columnwise=c, key=_KEY), ok  # type: ignore[misc]
    for spec in _SPECS[:1] + _SPECS[4:6]:
        a, b = quantize(x, spec), quantize(w, spec)
        ok = bool(
            torch.allclose(gemm_nt(a, b, out_dtype=torch.float32), a.dequantize() @ b.dequantize().t(), atol=1e-3)
        )
        yield f"decode {spec}", a.decode, ok
        yield f"gemm_nt {spec} -> bf16", lambda a=a, b=b: gemm_nt(a, b, out_dtype=torch.bfloat16), ok  # type: ignore[misc]
    yield "torch.matmul fp32", lambda: x.float() @ w.float().t(), True


def measure(function: Callable[[], object], device: str, runs: int) -> list[float]:
    """Microseconds of each run, sorted, after two that are not counted."""
    times = []
    for run in range(runs + 2):
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        if run >= 2:
            times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    where = platform.processor() or platform.machine()
    where = where if arguments.device == "cpu" else torch.cuda.get_device_name()
    print(f"# {where}, torch {torch.__version__}, {arguments.threads} threads, warm cache, {arguments.runs} runs")
    print(f"# x {arguments.rows}x{arguments.cols} bf16")
    for name, function, ok in cases(arguments.rows, arguments.cols, arguments.device):
        times = measure(function, arguments.device, arguments.runs)
        median, p20, p80 = statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5]
        rate = arguments.rows * arguments.cols * 4 / median / 1e3
        print(f"{name:62s} | {median:9.0f} [{p20:.0f} {p80:.0f}] | {rate:6.2f} | {'ok' if ok else 'WRONG'}")


if __name__ == "__main__":
    main()
