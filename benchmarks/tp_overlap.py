"""Tensor-parallel collectives with GEMMs: NCCL then GEMM, torch's fused operators, and this package's overlap.

    torchrun --nproc-per-node 2 benchmarks/tp_overlap.py --json rows.jsonl          about nine minutes on 2 H200
    torchrun --nproc-per-node 2 benchmarks/tp_overlap.py --device cpu --scale 64    does it run? (times mean nothing)

Shapes are those of Llama-3 8B and 70B layers over 8192 tokens (`_tp_shapes.py`): real shards on 4 and 8 ranks; on two also those
of eight, which gives about TP=8's ratio of compute to communication. "captured" replays the same call from a CUDA graph.

    ms        median of back-to-back calls on the compute stream, slowest rank [20th, 80th percentile]
    x         baseline / ms; baseline: the library's collective then one GEMM, or one GEMM then the collective
    hidden    (baseline - ms) / (baseline - max(GEMM alone, library's collective alone)): 1 is perfect
    host      time to enqueue a call
    ok        relative error against the baseline over back-to-back calls on other inputs, outputs filled with NaN before
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._ranks import Ranks, Row, Timing, geometric_mean, relative_error
from benchmarks._tp_layer import layer_rows
from benchmarks._tp_shapes import TOKENS, shapes_of
from benchmarks._tp_transports import TRANSPORTS, Library, open_transport, ways_to_send
from primus_turbo_plugin.communication.costs import costs_of
from primus_turbo_plugin.communication.opening import describe
from primus_turbo_plugin.communication.overlap import Overlap, Payload
from primus_turbo_plugin.communication.transports.base import Transport

with contextlib.suppress(ImportError):
    import torch.distributed._symmetric_memory

TOLERANCE = 2e-2  # two roundings to bf16 of sums of a few thousand terms


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to do it: `run(input set, output or None)`; None where the output is not wanted (for timing)."""

    name: str
    run: Callable[[int, Tensor | None], Tensor]


class Bench:
    """One benchmark run.

    Args:
        ranks: This process among the others.
        transport: Of the overlap.
        iterations: Calls timed a variant.
        dtype: Of the operands.
        json_path: Rows are appended to this file as they come.

    Attributes:
        in_graphs: What CUDA graphs are captured of: eager calls of the same overlap would begin with a handshake ever after.
    """

    def __init__(
        self, ranks: Ranks, transport: Transport, iterations: int, dtype: torch.dtype, json_path: str | None
    ) -> None:
        self.ranks, self.transport, self.iterations, self.dtype = ranks, transport, iterations, dtype
        self.json_path = json_path
        self.overlap, self.in_graphs = (Overlap(transport, costs=costs_of(ranks.device)) for _ in range(2))
        self.ways = ways_to_send(transport)
        self.rows: list[Row] = []

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.ranks.device) * scale

    def compare(
        self,
        kind: str,
        shape: str,
        alone: dict[str, Callable[[], object]],
        variants: list[Variant],
        out_shape: tuple[int, int],
    ) -> None:
        """Times the parts alone and each variant; the first variant is the baseline and the reference."""
        if not self.ranks.enough_time(30):
            self.ranks.say(f"\n{kind} {shape}: no time left")
            return
        self.ranks.say(f"\n{kind} {shape}")
        times: dict[str, Timing | None] = {}
        for name, call in alone.items():
            problem = self.ranks.agree(self._attempt(call)[0])
            if problem:
                self._keep(Row(kind=kind, shape=shape, variant=name, timing=None, ok=f"cannot: {problem}"))
            else:
                times[name] = self._time(kind, shape, name, call).timing
        references: list[Tensor] | None = None
        baseline: Row | None = None
        for variant in variants:
            problem, found = self._attempt(lambda v=variant: self._outputs(v, out_shape))
            problem = self.ranks.agree(problem)
            if problem:
                self._keep(Row(kind=kind, shape=shape, variant=variant.name, timing=None, ok=f"cannot: {problem}"))
                continue
            references = found if references is None else references
            error = max(relative_error(a, b) for a, b in zip(found, references))
            worst = self.ranks.agree("" if error < TOLERANCE else f"WRONG, relative error {error:.1e}")
            row = self._time(kind, shape, variant.name, lambda v=variant: v.run(0, None), keep=False)
            row.ok = worst or f"err {error:.0e}"
            baseline = row if baseline is None else baseline
            self._judge(row, baseline, times)
            self._keep(row)

    def _attempt(self, call: Callable[[], Any]) -> tuple[str, Any]:
        """What went wrong on this rank, in a line, and the result."""
        try:
            result = call()
            self.ranks.synchronize()
        except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:140] if str(error) else ''}", None
        return "", result

    def _outputs(self, variant: Variant, shape: tuple[int, int]) -> list[Tensor]:
        """Back to back, no synchronisation in between, every output poisoned before."""
        outputs = []
        for call in range(6):
            out = torch.full(shape, math.nan, dtype=self.dtype, device=self.ranks.device)
            outputs.append(variant.run(call % 3, out))
        self.ranks.synchronize()
        return outputs

    def _time(self, kind: str, shape: str, name: str, call: Callable[[], object], *, keep: bool = True) -> Row:
        row = Row(kind=kind, shape=shape, variant=name, timing=self.ranks.timed(call, self.iterations))
        if keep:
            self._keep(row)
        return row

    @staticmethod
    def _judge(row: Row, baseline: Row, alone: dict[str, Timing | None]) -> None:
        assert row.timing is not None
        assert baseline.timing is not None
        row.speedup = baseline.timing.ms / row.timing.ms
        floor = max((t.ms for name, t in alone.items() if t is not None and not name.startswith("ours")), default=0.0)
        if baseline.timing.ms - floor > 1e-3:
            row.hidden = (baseline.timing.ms - row.timing.ms) / (baseline.timing.ms - floor)

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self.ranks.say(row.text())
        self.write([row])

    def write(self, rows: list[Row]) -> None:
        """Appends rows to the file, if there is one."""
        if self.json_path and self.ranks.rank == 0:
            with Path(self.json_path).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({**row.plain(), "ranks": self.ranks.size}) + "\n" for row in rows)

    def _ways(self, x: Tensor) -> dict[str, Callable[[], object]]:
        """The gather with a lane a peer, which is what ranks with a link to each peer want, and with one for all."""
        if self.ranks.size == 2:
            return {}

        def run(overlap: Overlap) -> Callable[[], object]:
            return lambda: overlap.start_gather(Payload.plain(x)).wait()

        return {f"ours alone, {name}": run(overlap) for name, overlap in self.ways.items()}

    def gather(self, tokens: int, k: int, n: int) -> None:
        """y = AG(x) @ w.T."""
        ranks, size = self.ranks, self.ranks.size
        xs, w = [self.random(tokens // size, k) for _ in range(3)], self.random(n, k, scale=k**-0.5)
        full, y, turned = self.random(tokens, k), self.random(tokens, n), w.t()
        library = Library(ranks)

        def sequential(i: int, out: Tensor | None) -> Tensor:
            library.all_gather(full, xs[i])
            return torch.mm(full, turned, out=y if out is None else out)

        def fused(i: int, out: Tensor | None) -> Tensor:
            _, (result,) = torch.ops.symm_mem.fused_all_gather_matmul(
                xs[i], [turned], 0, ranks.group.group_name, return_A=False
            )
            return result

        def ours(overlap: Overlap, i: int, out: Tensor | None) -> Tensor:
            target = y if out is None else out
            overlap.gather_gemm(Payload.plain(xs[i]), multiply, target, k)
            return target

        def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
            torch.mm(planes[0], turned, out=out)

        alone = {
            "GEMM alone": lambda: torch.mm(full, turned, out=y),
            "library's all-gather alone": lambda: library.all_gather(full, xs[0]),
            "ours alone": lambda: self.overlap.start_gather(Payload.plain(xs[0])).wait(),
        }
        alone |= self._ways(xs[0])
        variants = [Variant(f"{library.name}, then GEMM", sequential), Variant("torch fused_all_gather_matmul", fused)]
        variants += self._chunked(ours, merge=True)
        self.compare("AG+GEMM", f"{tokens}x{k}x{n}", alone, variants, (tokens, n))

    def scatter(self, tokens: int, k: int, n: int) -> None:
        """y = RS(x @ w.T)."""
        ranks, size = self.ranks, self.ranks.size
        xs, w = [self.random(tokens, k) for _ in range(3)], self.random(n, k, scale=k**-0.5)
        part, y, turned = self.random(tokens, n), self.random(tokens // size, n), w.t()
        library = Library(ranks)

        def sequential(i: int, out: Tensor | None) -> Tensor:
            torch.mm(xs[i], turned, out=part)
            target = y if out is None else out
            library.reduce_scatter(target, part)
            return target

        def fused(i: int, out: Tensor | None) -> Tensor:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(xs[i], turned, "sum", 0, ranks.group.group_name)

        def ours(overlap: Overlap, i: int, out: Tensor | None) -> Tensor:
            target = y if out is None else out
            adds = ranks.device.type == "cuda"
            return overlap.gemm_scatter(Payload.plain(xs[i]), multiply, target, k, can_add=adds)

        def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
            if add is None:
                torch.mm(planes[0], turned, out=out)
            else:
                torch.addmm(add, planes[0], turned, out=out)

        alone = {
            "GEMM alone": lambda: torch.mm(xs[0], turned, out=part),
            "library's reduce-scatter alone": lambda: library.reduce_scatter(y, part),
            "ours alone": lambda: self.overlap.start_scatter(part).wait(),
        }
        variants = [
            Variant(f"GEMM, then {library.name}", sequential),
            Variant("torch fused_matmul_reduce_scatter", fused),
        ]
        variants += self._chunked(ours)
        self.compare("GEMM+RS", f"{tokens}x{k}x{n}", alone, variants, (tokens // size, n))

    def _chunked(self, ours: Callable[[Overlap, int, Tensor | None], Tensor], *, merge: bool = False) -> list[Variant]:
        """The cost model's choice, which is what a layer runs, every fixed number of chunks, and senders merged."""

        def fixed(
            chunks: int | None, merge: int = 1, overlap: Overlap = self.overlap
        ) -> Callable[[int, Tensor | None], Tensor]:
            def run(i: int, out: Tensor | None) -> Tensor:
                overlap.chunks, overlap.merge = chunks, merge
                return ours(overlap, i, out)

            return run

        found = [Variant("ours", fixed(None))]
        if self.transport.capabilities.name == "sdma":
            found.append(Variant("ours, captured", self._captured(fixed(None, overlap=self.in_graphs))))
        found += [Variant(f"ours, {chunks} chunk(s)", fixed(chunks)) for chunks in (1, 2, 4)]
        merges = sorted({2, self.ranks.size // 2, self.ranks.size - 1}) if merge and self.ranks.size > 2 else []
        return found + [Variant(f"ours, {count} senders at once", fixed(1, count)) for count in merges]

    @staticmethod
    def _captured(run: Callable[[int, Tensor | None], Tensor]) -> Callable[[int, Tensor | None], Tensor]:
        """A graph for each set of inputs, captured at its first use; the outputs are the graph's own."""
        graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

        def replay(i: int, out: Tensor | None) -> Tensor:
            if i not in graphs:
                run(i, None)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                    graphs[i] = graph, run(i, None)
            graph, result = graphs[i]
            graph.replay()
            return result if out is None else out.copy_(result)

        return replay

    def bulk(self, tokens: int, k: int, n: int) -> None:
        """AG or RS of [tokens, k] under an unrelated GEMM [tokens, k] x [k, n]."""
        size, library = self.ranks.size, Library(self.ranks)
        shards, a, w = [self.random(tokens // size, k) for _ in range(3)], self.random(tokens, k), self.random(n, k)
        wholes = [self.random(tokens, k) for _ in range(3)]
        full, share, y, turned = self.random(tokens, k), self.random(tokens // size, k), self.random(tokens, n), w.t()

        def gemm() -> None:
            torch.mm(a, turned, out=y)

        def gather(i: int, out: Tensor | None, *, under: bool) -> Tensor:
            target = full if out is None else out
            if not under:
                library.all_gather(target, shards[i])
                gemm()
            else:
                work = library.all_gather(target, shards[i], async_op=True)
                gemm()
                work.wait()
            return target

        def our_gather(i: int, out: Tensor | None) -> Tensor:
            pending = self.overlap.start_gather(Payload.plain(shards[i]))
            gemm()
            (gathered,) = pending.wait()
            return gathered if out is None else out.copy_(gathered)  # before the slot is used again

        def scatter(i: int, out: Tensor | None, *, under: bool) -> Tensor:
            target = share if out is None else out
            if not under:
                library.reduce_scatter(target, wholes[i])
                gemm()
            else:
                work = library.reduce_scatter(target, wholes[i], async_op=True)
                gemm()
                work.wait()
            return target

        def our_scatter(i: int, out: Tensor | None) -> Tensor:
            pending = self.overlap.start_scatter(wholes[i])
            gemm()
            return pending.wait()

        shape = f"{tokens}x{k} under a GEMM {tokens}x{k}x{n}"
        for kind, theirs, ours, call, out_shape in (
            ("bulk AG", gather, our_gather, lambda: library.all_gather(full, shards[0]), (tokens, k)),
            ("bulk RS", scatter, our_scatter, lambda: library.reduce_scatter(share, wholes[0]), (tokens // size, k)),
        ):
            variants = [
                Variant(f"{library.name}, then GEMM", lambda i, out, f=theirs: f(i, out, under=False)),
                Variant(f"{library.name} asynchronously", lambda i, out, f=theirs: f(i, out, under=True)),
                Variant("ours", ours),
            ]
            self.compare(kind, shape, {"GEMM alone": gemm, "library's alone": call}, variants, out_shape)

    def summary(self) -> None:
        """What the project asks of these numbers, and what came out."""
        fused = [row for row in self.rows if row.kind in ("AG+GEMM", "GEMM+RS")]
        ours = [row for row in fused if row.variant == "ours" and row.speedup]
        if not ours:
            return
        theirs = {(r.kind, r.shape): r for r in fused if r.variant.startswith("torch") and r.timing}
        gemms = {(r.kind, r.shape): r.timing.ms for r in fused if r.variant == "GEMM alone" and r.timing}
        behind = [r.shape for r in ours if (t := theirs.get((r.kind, r.shape))) and t.timing.ms < r.timing.ms]
        say = self.ranks.say
        asked = 1.3 if self.ranks.size >= 8 else 1.25
        mean = geometric_mean([r.speedup for r in ours])
        say(f"\ngeometric mean over {len(ours)} shapes: {mean:.2f}x (asked: {asked}x)")
        say(f"behind torch's fused operators on: {', '.join(behind) or 'no shape'} ({len(theirs)} compared)")
        for kind, least in (("AG+GEMM", 0.9), ("GEMM+RS", 0.75)):
            large = [
                r for r in ours if r.kind == kind and gemms.get((r.kind, r.shape), 0.0) >= 0.5 and r.hidden is not None
            ]
            shares = ", ".join(f"{r.shape} {r.hidden:.2f}" for r in large)
            say(f"{kind} hidden where the GEMM takes 0.5 ms or more (asked: {least}): {shares or 'none measured'}")
        captured = [r.timing.host_us for r in fused if r.variant == "ours, captured" and r.timing]
        graph = f"; from a CUDA graph {max(captured):.0f} us" if captured else ""
        say(f"host time a call, worst: {max(r.timing.host_us for r in ours):.0f} us{graph} (asked: 150 us)")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", choices=TRANSPORTS, help="default: sdma on cuda, shared_memory on cpu")
    parser.add_argument("--memory", choices=("symmetric", "ipc"), help="of sdma; default: the first that works")
    parser.add_argument("--parts", default="fused,bulk,layer", help="which tables, separated by commas")
    parser.add_argument("--scale", type=int, default=1, help="divide every size by this (to see whether it runs)")
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds")
    parser.add_argument("--json", help="append the rows to this file as JSON lines")
    return parser.parse_args()


def main() -> None:
    options = parse()
    ranks = Ranks(options.device, options.budget)
    transport = open_transport(ranks, options.transport, memory=options.memory)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    bench = Bench(ranks, transport, options.iterations, dtype, options.json)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU (no times worth reading)"
    ranks.say(f"{name}, {ranks.size} ranks, torch {torch.__version__}, hip {torch.version.hip}")
    ranks.say("\n".join(describe(bench.overlap, None)))
    parts = options.parts.split(",")
    tokens, scale, shapes = TOKENS // options.scale, options.scale, shapes_of(ranks.size)
    if "fused" in parts:
        for gather, scatter in itertools.zip_longest(
            shapes.gathers, shapes.scatters
        ):  # a time-out leaves both measured
            for measure, shape in ((bench.gather, gather), (bench.scatter, scatter)):
                if shape is not None:
                    measure(tokens, *(max(size // scale, 2) for size in shape))
    if "bulk" in parts:
        for shape in shapes.bulks:
            bench.bulk(tokens, *(max(size // scale, 2) for size in shape))
    bench.overlap.chunks, bench.overlap.merge = None, 1
    if "layer" in parts:
        for rows in layer_rows(ranks, bench.overlap, dtype, tokens=tokens, scale=scale, iterations=options.iterations):
            bench.rows += rows
            bench.write(rows)
    bench.summary()
    ranks.synchronize()
    dist.barrier(group=ranks.control)
    sys.stdout.flush()
    os._exit(0)  # the order in which NCCL and symmetric memory are torn down is not worth a hang


if __name__ == "__main__":
    main()
