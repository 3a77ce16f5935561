"""What every benchmark shares: the header, the clock, one printed row a case, and JSON lines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

WARM_UP = 3
SAMPLES = 15
MIN_CALLS_PER_GRAPH = 6
CACHE_EXCEEDING_BYTES = 1 << 29


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One case and its time in microseconds. `ok` is the numeric check made before timing.

    Attributes:
        op: What was done.
        shape: On what.
        backend: By whom.
        us: Median time.
        us_p20: 20th percentile.
        us_p80: 80th percentile.
        ok: The result of the check, or why there was none.
    """

    op: str
    shape: str
    backend: str
    us: float
    us_p20: float
    us_p80: float
    ok: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(Timed):
    """One measured case, and what bounds it.

    Attributes:
        bytes: Bytes that must move (each input read once, each output written once).
        flops: Floating-point operations of a matrix product, else 0.
        roof: Measured ceiling: bytes/s for bytes, FLOP/s for flops.
    """

    bytes: float
    flops: float
    roof: float

    @property
    def share_of_roof(self) -> float:
        work = self.flops or self.bytes
        return work / (self.us * 1e-6) / self.roof

    def text(self, baseline_us: float) -> str:
        rate = f"{self.flops / self.us / 1e6:7.1f} TF" if self.flops else f"{self.bytes / self.us / 1e3:7.0f} GB/s"
        return (
            f"{self.op:22} {self.shape:30} {self.backend:34} {self.us:9.1f} [{self.us_p20:8.1f} {self.us_p80:8.1f}] {rate} "
            f"{self.share_of_roof:6.1%} {baseline_us / self.us:7.2f}x  {self.ok}"
        )


HEADER = f"{'op':22} {'shape':30} {'backend':34} {'us':>9} [{'p20':>8} {'p80':>8}] {'rate':>12} {'% roof':>6} {'speed':>8}  ok"


def measure(function: Callable[[int], object], num_sets: int = 1) -> tuple[float, float, float]:
    """(median, 20th, 80th percentile) in microseconds of `function(i)` on input set i.

    The sets are used in turn inside one captured graph, so that neither launch gaps nor a warm L2 cache are measured; give enough
    sets to exceed the cache several times (`sets_for`). Outputs stay alive until the end of the capture, so they rotate as well.
    """
    for i in range(num_sets):
        function(i)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    calls = num_sets * max(1, MIN_CALLS_PER_GRAPH // num_sets)
    with torch.cuda.graph(graph):
        for call in range(calls):
            kept.append(function(call % num_sets))
    samples = []
    for _ in range(WARM_UP + SAMPLES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        samples.append((start, end))
    torch.cuda.synchronize()
    times = sorted(1e3 * start.elapsed_time(end) / calls for start, end in samples[WARM_UP:])
    return times[len(times) // 2], times[len(times) // 5], times[len(times) * 4 // 5]


def sets_for(num_bytes: int) -> int:
    """How many input sets of this size exceed any GPU's caches several times."""
    return max(2, -(-CACHE_EXCEEDING_BYTES // max(num_bytes, 1)))


def measure_launches(function: Callable[[], object]) -> tuple[float, float, float]:
    """As `measure`, for what cannot be captured in a graph: launches timed one by one, the L2 cache overwritten before each."""
    from triton.testing import do_bench

    median, low, high = do_bench(function, warmup=20, rep=100, quantiles=[0.5, 0.2, 0.8])
    return 1e3 * median, 1e3 * low, 1e3 * high


def copy_bandwidth(num_bytes: int = 7 << 28) -> float:
    """Bytes read plus written per second by device-to-device copies.

    The size is not a power of two: in a graph, copies of exactly 1 GiB and 4 GiB reached 2.7 TB/s where this size reached 4.26
    (one H200, 2026-11).
    """
    sources = [torch.randn(num_bytes // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    us, _, _ = measure(lambda i: sources[i].clone(), 2)
    return 2 * num_bytes / (us * 1e-6)


def machine() -> str:
    """Device, versions and commit."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    arch = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    root = Path(__file__).resolve().parents[1]
    commit = subprocess.run(
        ["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return (
        f"{properties.name} ({arch}), torch {torch.__version__}, triton {triton.__version__}, "
        f"commit {commit.stdout.strip() or 'unknown'}"
    )


def describe_machine() -> str:
    """The machine, and how times are taken: the first line of a report."""
    return f"{machine()}, cold L2 (rotating inputs), median of {SAMPLES} graph replays"


def report(rows: Iterable[Row], json_path: str | None) -> None:
    """Print rows, with the speed relative to the first row of the same op and shape; append them to a JSON lines file."""
    rows = list(rows)
    baselines: dict[tuple[str, str], float] = {}
    for row in rows:
        baseline = baselines.setdefault((row.op, row.shape), row.us)
        print(row.text(baseline), flush=True)
    if json_path:
        with open(json_path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row) | {"share_of_roof": row.share_of_roof}) + "\n" for row in rows)
