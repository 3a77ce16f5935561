"""Weak scaling of Llama-3-8B layers over tensor-parallel ranks: the tokens grow with the ranks, so each does the same work.

    python -m benchmarks.weak_scaling                              on 1, 2, 4 and 8 GPUs, as far as there are so many
    python -m benchmarks.weak_scaling --precision mxfp8            the same with quantised linears
    python -m benchmarks.weak_scaling --device cpu --ranks 1 2 --scale 64      does it run? (times mean nothing)

Every row is forward and backward of --layers layers over --tokens tokens a rank (sequences of --sequence), tensor- and
sequence-parallel, with the collectives under the GEMMs and without.

    ms            median of back-to-back steps, slowest rank
    x             overlap off / this, on the same ranks
    efficiency    ms of one rank / ms: 1 is perfect scaling
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._ranks import Ranks
from benchmarks._tp_layer import HEAD, MODELS, compare, stack_step, variants_of
from benchmarks._tp_transports import TRANSPORTS, open_transport
from primus_turbo_plugin.communication.costs import costs_of
from primus_turbo_plugin.communication.overlap import Overlap

KIND = "weak scaling"
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 40  # torchrun gives its ranks 30 s to end


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="*", help="numbers of ranks; default: 1, 2, 4, 8 up to the GPUs there are"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens that attend to each other")
    parser.add_argument("--precision", default="bf16", help="a recipe's preset")
    parser.add_argument("--scale", type=int, default=1, help="divide every size by this (to see whether it runs)")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds, for all together")
    parser.add_argument("--json", help="append the rows to this file as JSON lines")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if "RANK" in os.environ:
        _measure(options)
        return
    there = torch.cuda.device_count() if options.device == "cuda" else 2
    counts = options.ranks or [count for count in (1, 2, 4, 8) if count <= there]
    with tempfile.TemporaryDirectory(prefix="turbo-weak-") as folder:
        rows_file = options.json or str(Path(folder) / "rows.jsonl")
        for count in counts:
            _launch(count, options, rows_file, options.budget / len(counts))
        print(table([json.loads(line) for line in Path(rows_file).read_text(encoding="utf-8").splitlines()]))


def _launch(count: int, options: argparse.Namespace, rows_file: str, budget: float) -> None:
    """One job of so many ranks; one that fails or takes too long does not keep the others from being measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "benchmarks.weak_scaling", "--json", rows_file, "--budget", str(budget)]
    for name in ("device", "transport", "layers", "tokens", "sequence", "precision", "scale", "iterations"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    code = run_for(command, budget + 30)
    if code:
        print(f"{count} rank(s): ended with code {code}; its rows up to then are kept", flush=True)


def run_for(command: list[str], seconds: float) -> int:
    """The command's exit code. One that takes too long is asked to end: torchrun, killed, would leave its ranks on the GPUs."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _measure(options: argparse.Namespace) -> None:
    ranks, scale = Ranks(options.device, options.budget), options.scale
    overlap = None
    if ranks.size > 1:
        overlap = Overlap(open_transport(ranks, options.transport), costs=costs_of(ranks.device))
    dtype = torch.bfloat16 if options.device == "cuda" or options.precision != "bf16" else torch.float32
    tokens, sequence = options.tokens // scale * ranks.size, options.sequence // scale
    shape = f"{MODELS[0].name} x {options.layers} layers, {options.precision}, {options.tokens // scale} tokens a rank"
    ranks.say(f"\n{KIND}, TP={ranks.size}: {shape}")
    step = stack_step(
        ranks, dtype, MODELS[0].shrunk(scale), tp=ranks.size, layers=options.layers, tokens=tokens, sequence=sequence,
        head=max(2, HEAD // scale), recipe=options.precision,
    )  # fmt: skip
    rows = compare(ranks, KIND, shape, variants_of(step, overlap), options.iterations)
    if options.json and ranks.rank == 0:
        with Path(options.json).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**row.plain(), "ranks": ranks.size}) + "\n" for row in rows)
    ranks.synchronize()
    dist.barrier(group=ranks.control)
    sys.stdout.flush()
    os._exit(0)  # the order in which NCCL and symmetric memory are torn down is not worth a hang


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown of all numbers of ranks."""
    found = [row for row in rows if row["kind"] == KIND and row["timing"]]
    lines = [
        "| layers | ranks | variant | ms | overlap off / this | efficiency | check |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        one = next((r["timing"]["ms"] for r in found if r["ranks"] == 1 and r["shape"] == row["shape"]), None)
        ms = row["timing"]["ms"]
        efficiency = "-" if one is None else f"{one / ms:.2f}"
        cells = (
            row["shape"],
            row["ranks"],
            row["variant"],
            f"{ms:.3f}",
            f"{row['speedup']:.2f}x",
            efficiency,
            row["ok"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
