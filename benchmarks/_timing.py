"""What every benchmark shares: the header, the clock, one printed row a case, and JSON lines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

REPETITIONS_MS = 60
WARM_UP_MS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured case. `ok` is the numeric check made before timing; times are microseconds.

    Attributes:
        op: What was done.
        shape: On what.
        backend: By whom.
        us: Median time.
        us_p20: 20th percentile.
        us_p80: 80th percentile.
        bytes: Bytes that must move (each input read once, each output written once).
        flops: Floating-point operations of a matrix product, else 0.
        roof: Measured ceiling: bytes/s for bytes, FLOP/s for flops.
        ok: The result of the check, or why there was none.
    """

    op: str
    shape: str
    backend: str
    us: float
    us_p20: float
    us_p80: float
    bytes: float
    flops: float
    roof: float
    ok: str

    @property
    def share_of_roof(self) -> float:
        work = self.flops or self.bytes
        return work / (self.us * 1e-6) / self.roof

    def text(self, baseline_us: float) -> str:
        rate = f"{self.flops / self.us / 1e6:7.1f} TF" if self.flops else f"{self.bytes / self.us / 1e3:7.0f} GB/s"
        return (
            f"{self.op:22} {self.shape:30} {self.backend:34} {self.us:9.1f} [{self.us_p20:9.1f} {self.us_p80:9.1f}] {rate} "
            f"{self.share_of_roof:6.1%} {baseline_us / self.us:7.2f}x  {self.ok}"
        )


HEADER = (
    f"{'op':22} {'shape':30} {'backend':34} {'us':>9} [{'p20':>9} {'p80':>9}] {'rate':>12} {'% roof':>6} {'speed':>8}  ok"
)


def measure(function: Callable[[], object]) -> tuple[float, float, float]:
    """(median, 20th, 80th percentile) in microseconds, by device events, with a cold L2 cache before every run."""
    from triton.testing import do_bench

    quantiles = [0.5, 0.2, 0.8]
    median, low, high = do_bench(function, warmup=WARM_UP_MS, rep=REPETITIONS_MS, quantiles=quantiles)
    return 1e3 * median, 1e3 * low, 1e3 * high


def copy_bandwidth(num_bytes: int = 1 << 32) -> float:
    """Bytes read plus written per second by a device-to-device copy."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    us, _, _ = measure(lambda: target.copy_(source))
    return 2 * num_bytes / (us * 1e-6)


def describe_machine() -> str:
    """Device, versions and commit: the first line of a report."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    arch = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    root = Path(__file__).resolve().parents[1]
    commit = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{properties.name} ({arch}), torch {torch.__version__}, triton {triton.__version__}, "
        f"commit {commit.stdout.strip() or 'unknown'}, cold L2, median over {REPETITIONS_MS} ms of runs"
    )


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
