"""What `scripts/measure_multi_gpu.sh` has measured: Markdown for docs/performance.md, and numbers for communication/costs.py.

python -m benchmarks.multi_gpu_report FOLDER        with tp.jsonl, cp.jsonl and weak.jsonl, whichever are there
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._tp_transports import AT_ONCE, ONE_BY_ONE
from benchmarks.weak_scaling import table as weak_table
from primus_turbo_plugin.communication.costs import Costs

Rows = list[dict[str, Any]]
ASKED = {"AG+GEMM": 0.9, "GEMM+RS": 0.75}
LONG_MS = 0.5


def read(path: Path) -> Rows:
    """The rows of a file; none if it is not there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def report(folder: Path) -> str:
    """All tables of a folder."""
    tp, cp, weak = (read(folder / f"{name}.jsonl") for name in ("tp", "cp", "weak"))
    machine = folder / "machine.txt"
    parts = [machine.read_text(encoding="utf-8").strip()] if machine.exists() else []
    for ranks in sorted({row["ranks"] for row in tp}):
        rows = [row for row in tp if row["ranks"] == ranks]
        parts += [
            f"**{ranks} ranks**\n\n{fused_table(rows)}",
            "\n".join(verdict(rows)),
            layer_table(rows),
            costs(rows, ranks),
        ]
    if cp:
        parts.append(f"**Ring attention**\n\n{cp_table(cp)}")
    if weak:
        parts.append(f"**Weak scaling**\n\n{weak_table(weak)}")
    return "\n\n".join(part for part in parts if part) or "nothing has been measured"


def fused_table(rows: Rows) -> str:
    """A line a shape: the parts alone, then the speed over the library, and the hidden share, of each way."""
    head = (
        "collective",
        "shape",
        "GEMM ms",
        "library ms",
        "torch fused",
        "ours",
        "ours, captured",
        "host us (captured)",
        "check",
    )
    lines = [head, ("---",) * len(head)]
    for kind, shape in dict.fromkeys((row["kind"], row["shape"]) for row in rows if row["kind"] not in ("layer",)):
        named = {row["variant"]: row for row in rows if (row["kind"], row["shape"]) == (kind, shape)}
        ours, graph = named.get("ours"), named.get("ours, captured")
        alone = next((row for name, row in named.items() if name.startswith("library's")), None)
        fused = next((row for name, row in named.items() if name.startswith("torch fused")), None)
        host = " / ".join(f"{row['timing']['host_us']:.0f}" for row in (ours, graph) if row and row["timing"])
        cells = [kind, shape, _ms(named.get("GEMM alone")), _ms(alone), *map(_speed, (fused, ours, graph)), host]
        lines.append((*cells, ours["ok"] if ours else "-"))
    return _markdown(lines)


def verdict(rows: Rows) -> Iterator[str]:
    """What the project asks of these numbers, and what came out."""
    fused = [row for row in rows if row["kind"] in ASKED]
    ours = [row for row in fused if row["variant"] == "ours" and row["speedup"]]
    if not ours:
        return
    theirs = {(r["kind"], r["shape"]): r for r in fused if r["variant"].startswith("torch fused") and r["timing"]}
    gemm = {(r["kind"], r["shape"]): r["timing"]["ms"] for r in fused if r["variant"] == "GEMM alone" and r["timing"]}
    mean = statistics.geometric_mean([row["speedup"] for row in ours])
    behind = [
        f"{row['kind']} {row['shape']}"
        for row in ours
        if (other := theirs.get((row["kind"], row["shape"]))) and other["timing"]["ms"] < row["timing"]["ms"]
    ]
    yield f"- Geometric mean over {len(ours)} shapes: {mean:.2f}x over the library, then GEMM."
    yield f"- Behind torch's fused operators on: {', '.join(behind) or 'none'} of {len(theirs)} compared."
    for kind, least in ASKED.items():
        long = [
            row
            for row in ours
            if row["kind"] == kind and gemm.get((kind, row["shape"]), 0) >= LONG_MS and row["hidden"] is not None
        ]
        short = [f"{row['shape']} {row['hidden']:.2f}" for row in long if row["hidden"] < least]
        if long:
            missed = f"; not on {', '.join(short)}" if short else ""
            reached = f"{least:.0%} hidden on {len(long) - len(short)} of {len(long)}"
            yield f"- {kind}, GEMM of {LONG_MS} ms or more: {reached}{missed}."
    wrong = [f"{row['kind']} {row['shape']} {row['variant']}" for row in rows if "WRONG" in row["ok"]]
    yield f"- Wrong results: {', '.join(wrong) or 'none'}."


def layer_table(rows: Rows) -> str:
    """Whole layers."""
    found = [row for row in rows if row["kind"] == "layer"]
    if not found:
        return ""
    head = ("layer, forward + backward", "variant", "ms", "speed", "host us", "check")
    lines = [head, ("---",) * len(head)]
    for row in found:
        host = f"{row['timing']['host_us']:.0f}" if row["timing"] else "-"
        lines.append((row["shape"], row["variant"], _ms(row), _speed(row), host, row["ok"]))
    return _markdown(lines)


def cp_table(rows: Rows) -> str:
    """Context parallelism, from benchmarks/context_parallel.py."""
    head = ("algorithm", "direction", "shape", "ranks", "together ms", "attention ms", "messages ms", "hidden")
    head = (*head, "TFLOP/s a rank", "check")
    lines = [head, ("---",) * len(head)]
    for row in rows:
        times = (row["together_ms"], row["attention_ms"], row["messages_ms"])
        cells = [row["algorithm"], row["direction"], row["shape"], str(row["ranks"])]
        cells += ["-" if t is None else f"{t:.3f}" for t in times]
        hidden = "-" if row["hidden"] is None else f"{row['hidden']:.0%}"
        lines.append((*cells, hidden, f"{row['tflops_a_rank']:.0f}", row["ok"]))
    return _markdown(lines)


def costs(rows: Rows, ranks: int) -> str:
    """The fields of a row of communication/costs.py that these rows tell."""
    timed = [row for row in rows if row["timing"]]
    gathers = [row for row in timed if row["kind"] == "AG+GEMM"]
    if not gathers:
        return ""
    by_shape: dict[str, dict[str, float]] = {}
    hosts: dict[str, float] = {}
    for row in gathers:
        by_shape.setdefault(row["shape"], {})[row["variant"]] = row["timing"]["ms"]
        if row["variant"] == "ours, 1 chunk(s)":
            hosts[row["shape"]] = row["timing"]["host_us"]
    found: dict[str, str] = {}
    flops = [2e-9 * _product(s) / t["GEMM alone"] for s, t in by_shape.items() if "GEMM alone" in t]
    copies = {
        name: [_incoming(s, ranks) / t[name] / 1e6 for s, t in by_shape.items() if name in t]
        for name in ("ours alone", f"ours alone, {AT_ONCE}", f"ours alone, {ONE_BY_ONE}")
    }
    at_once, one_by_one = copies[f"ours alone, {AT_ONCE}"], copies[f"ours alone, {ONE_BY_ONE}"]
    if flops:
        found["gemm_tflops"] = f"{max(flops):.0f}"
    if copies["ours alone"]:
        found["copy_gb_s"] = f"{max(map(max, filter(None, copies.values()))):.0f}"
    if at_once and one_by_one:
        found["switched"] = str(max(one_by_one) >= max(at_once))
    if hosts:
        found["host_us"] = f"{statistics.median(hosts.values()) / (6 * ranks + 4 * (ranks - 1)):.1f}"
    split = [t["GEMM alone"] for t in by_shape.values() if "GEMM alone" in t and _wants_chunks(t)]
    if split:
        found["split_gemm_ms"] = f"{min(split):.2f}"
    speeds = [(t["GEMM alone"], speed) for t in by_shape.values() if "GEMM alone" in t and (speed := _speedup(t))]
    lost = max((gemm for gemm, speed in speeds if speed < 1), default=0.0)
    won = [gemm for gemm, _ in speeds if gemm > lost]
    if won:
        found["min_gemm_ms"] = f"{min(won):.2f}"
    lines = [f"    {name}={value}," for name, value in found.items()]
    if speeds and not won:
        lines.append(f"    # min_gemm_ms: nothing was won with GEMMs of up to {lost:.2f} ms")
    rest = ", ".join(sorted({field.name for field in dataclasses.fields(Costs)} - set(found) - {"source"}))
    told = (
        f"For communication/costs.py; these rows do not tell {rest}, which a device's row has already or still needs:"
    )
    return "\n".join((told, "", "```python", *lines, "```"))


def _product(shape: str) -> float:
    rows, contraction, columns = map(int, shape.split("x"))
    return float(rows * contraction * columns)


def _incoming(shape: str, ranks: int) -> float:
    """bf16 bytes that a rank receives."""
    tokens, hidden, _ = map(int, shape.split("x"))
    return 2.0 * tokens * (ranks - 1) / ranks * hidden


def _wants_chunks(times: dict[str, float]) -> bool:
    cut = [ms for name, ms in times.items() if name in ("ours, 2 chunk(s)", "ours, 4 chunk(s)")]
    return bool(cut) and min(cut) < times.get("ours, 1 chunk(s)", 0.0)


def _speedup(times: dict[str, float]) -> float:
    """Over the library; 0 where one of the two could not be measured."""
    base = next((ms for name, ms in times.items() if name.endswith(", then GEMM")), 0.0)
    return base / times["ours"] if "ours" in times else 0.0


def _ms(row: dict[str, Any] | None) -> str:
    return f"{row['timing']['ms']:.3f}" if row and row["timing"] else "-"


def _speed(row: dict[str, Any] | None) -> str:
    if not row or not row["timing"]:
        return "-"
    hidden = "" if row["hidden"] is None else f" ({row['hidden']:.2f})"
    return f"{row['speedup']:.2f}x{hidden}"


def _markdown(lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(report(Path(sys.argv[1])))
