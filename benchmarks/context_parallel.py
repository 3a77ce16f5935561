"""Attention over the ranks of a context-parallel group, and how much of the ring's messages is hidden under attention.

    python -m benchmarks.context_parallel [--ranks 2] [--tokens 32768] [--window 1024] [--json rows.jsonl]
    python -m benchmarks.context_parallel --device cpu          # toy sizes over gloo: shows that it runs, measures nothing

One process a rank, NCCL or RCCL on GPUs. For the ring, three times are taken, each the slowest rank's median:

    together    attention with its messages
    attention   the same calls, with keys that need not come and gradients that need not go home
    messages    the same messages, with nothing to compute
    hidden      (attention + messages - together) / messages: the share of the messages under attention

`ok` compares out, dq, dk and dv with attention on one rank, at --check-tokens, before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# NVLink multicast off, before NCCL is loaded: hosts whose fabric manager forbids it hang in it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Pending, ready
from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.functional.context_parallel import ContextParallel, ring
from primus_turbo_plugin.functional.context_parallel.messages import empty_message
from primus_turbo_plugin.functional.context_parallel.ring import Ring
from primus_turbo_plugin.functional.context_parallel.schedule import rows_of
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, AttentionRequest
from primus_turbo_plugin.kernels.registry import default_registry

_WARM_UP, _SAMPLES = 2, 9
_SNR_DB = 40.0
_TOY = {"tokens": 256, "heads": 4, "groups": 2, "dim": 16, "check_tokens": 64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Times in milliseconds of the slowest rank, MiB of the one that sends most; `attention` to `hidden` for the ring only."""

    algorithm: str
    direction: str
    shape: str
    ranks: int
    together_ms: float
    attention_ms: float | None = None
    messages_ms: float | None = None
    message_mib: float | None = None
    hidden: float | None = None
    tflops_a_rank: float
    ok: str

    def text(self) -> str:
        """A line under `_HEADER`."""
        ring_only = (
            (self.attention_ms, 10, ".3f"),
            (self.messages_ms, 10, ".3f"),
            (self.message_mib, 9, ".1f"),
            (self.hidden, 7, ".1%"),
        )
        cells = [f"{'-':>{width}}" if value is None else f"{value:{width}{form}}" for value, width, form in ring_only]
        start = f"{self.algorithm:11} {self.direction:9} {self.shape:34} {self.ranks:5} {self.together_ms:10.3f}"
        return " ".join([start, *cells, f"{self.tflops_a_rank:8.1f}", f" {self.ok}"])


_HEADER = (
    f"{'algorithm':11} {'direction':9} {'shape':34} {'ranks':>5} {'together':>10} {'attention':>10} {'messages':>10} "
    f"{'MiB sent':>9} {'hidden':>7} {'TF/rank':>8}  ok"
)


def main() -> None:
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="turbo-cp-") as folder:
        arguments = (options, str(Path(folder) / "store"))
        multiprocessing.spawn(_rank_main, args=arguments, nprocs=options.ranks, join=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", type=int, help="of the whole sequence (32768; cpu 256)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, help="query heads (32; cpu 4)")
    parser.add_argument("--groups", type=int, help="key heads (8; cpu 2)")
    parser.add_argument("--dim", type=int, help="of a head (128; cpu 16)")
    parser.add_argument("--window", type=int, default=-1, help="keys that a query sees behind it; -1 for all")
    parser.add_argument("--algorithms", nargs="*", default=["p2p", "all_gather", "a2a"])
    parser.add_argument("--check-tokens", type=int, help="of the numeric check (4096; cpu 64)")
    parser.add_argument("--json", help="append the rows to this JSON lines file")
    options = parser.parse_args()
    full = {"tokens": 32768, "heads": 32, "groups": 8, "dim": 128, "check_tokens": 4096}
    for name, value in (full if options.device == "cuda" else _TOY).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        parser.error(
            f"{options.ranks} ranks need as many GPUs, and there are {torch.cuda.device_count()}. "
            "Set --ranks, or --device cpu for a toy run."
        )
    return options


def _rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", rank)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    if rank == 0:
        kernel = _served_by(_Case.draw(options, 2 * options.ranks, device, share=True))
        print(f"{_machine(device)}, {kernel} kernel\n\n{_HEADER}", flush=True)
    for algorithm in options.algorithms:
        for row in _rows(algorithm, options, device):
            if rank == 0:
                print(row.text(), flush=True)
                if options.json:
                    with open(options.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort a process that is taken down while a peer's socket closes


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        from benchmarks._timing import describe_machine

        return f"{dist.get_world_size()} x {describe_machine()}"
    return f"{platform.machine()} CPU, torch {torch.__version__}, gloo: a toy run, its times say nothing about GPUs"


@dataclass(frozen=True, slots=True)
class _Case:
    """A rank's share of the problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: AttentionMask

    @classmethod
    def draw(cls, options: argparse.Namespace, tokens: int, device: torch.device, share: bool) -> _Case:
        """[tokens, batch, heads, dim] as Megatron has them, drawn alike on every rank; `share` takes this rank's chunks."""
        generator = torch.Generator(device).manual_seed(1)
        tensors = []
        for heads in (options.heads, options.groups, options.groups, options.heads):
            shape = (tokens, options.batch, heads, options.dim)
            x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).bfloat16()
            tensors.append(share_of(x) if share else x)
        return cls(*tensors, AttentionMask(causal=True, window=(options.window, -1)))


def share_of(x: Tensor) -> Tensor:
    """This rank's two chunks of the first dimension."""
    chunks = x.chunk(2 * dist.get_world_size())
    return torch.cat((chunks[dist.get_rank()], chunks[-1 - dist.get_rank()]))


def _rows(algorithm: Any, options: argparse.Namespace, device: torch.device) -> list[Row]:
    context = ContextParallel(group=dist.group.WORLD, algorithm=algorithm)
    ok = _check(context, options, device)
    case = _Case.draw(options, options.tokens, device, share=True)
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]

    def forward() -> Tensor:
        return attention(*leaves, mask=case.mask, context=context)

    out = forward()
    runs: dict[str, Callable[[], Any]] = {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, leaves, case.dout, retain_graph=True),
    }
    window = "" if options.window < 0 else f" w{options.window}"
    shape = f"b{options.batch} s{options.tokens} h{options.heads}/{options.groups} d{options.dim}{window}"
    rows = []
    for direction, run in runs.items():
        together = _clock(run, device)
        fields: dict[str, Any] = {}
        if algorithm == "p2p":
            fields = _ring_times(run, case, direction == "backward", together, device)
        flops = _visible(options) * options.heads * options.batch * options.dim * (4 if direction == "forward" else 10)
        rows.append(
            Row(
                algorithm=algorithm, direction=direction, shape=shape, ranks=options.ranks, together_ms=together, ok=ok,
                tflops_a_rank=flops / options.ranks / together / 1e9, **fields,
            )
        )  # fmt: skip
    return rows


def _visible(options: argparse.Namespace) -> float:
    """(query, key) pairs of a sequence."""
    reach = options.tokens if options.window < 0 else min(options.window + 1, options.tokens)
    return reach * (options.tokens - reach) + reach * (reach + 1) / 2


def _ring_times(
    run: Callable[[], Any], case: _Case, backward: bool, together: float, device: torch.device
) -> dict[str, Any]:
    exchange = ring.exchange

    def nothing_travels(sent: Any, receiver: int, received: Any, sender: int, group: Any) -> Pending[Any]:
        return ready(received)

    ring.exchange = nothing_travels
    alone = _clock(run, device)
    ring.exchange = exchange
    messages, num_bytes = _messages(case, backward)
    travel = _clock(messages, device)
    most = torch.tensor(num_bytes, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    num_bytes = int(most)
    hidden = min(1.0, max(0.0, (alone + travel - together) / travel)) if num_bytes else None
    return {"attention_ms": alone, "messages_ms": travel, "message_mib": num_bytes / 2**20, "hidden": hidden}


def _messages(case: _Case, backward: bool) -> tuple[Callable[[], None], int]:
    """The ring's messages alone, and the bytes that this rank sends."""
    k, v = case.k.transpose(0, 1), case.v.transpose(0, 1)
    engine = Ring(None, dist.group.WORLD)
    options = AttentionOptions(scale=1.0, mask=case.mask)
    steps = engine.schedule(k, options)
    found = [empty_message(k, v, rows_of(step.incoming), torch.float32) for step in steps]

    def run() -> None:
        last = None
        for number, (step, _, _) in enumerate(engine.visits(k, v, options)):
            if backward and number:
                if last is not None:
                    last.wait()
                last = engine.send_home(step, found[number], k, v)
        if last is not None:
            last.wait()

    size = sum(empty_message(k, v, rows_of(step.outgoing), k.dtype).nbytes for step in steps)
    return run, size + (sum(x.nbytes for x in found) if backward else 0)


def _check(context: ContextParallel, options: argparse.Namespace, device: torch.device) -> str:
    """SNR of the worst tensor against one rank."""
    whole = _Case.draw(options, options.check_tokens, device, share=False)
    mine = _Case.draw(options, options.check_tokens, device, share=True)
    results = []
    for case, over in ((whole, None), (mine, context)):
        leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        out = attention(*leaves, mask=case.mask, context=over)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, case.dout)])
    ratios = []
    for want, got in zip(*results):
        want = share_of(want).double()
        ratios.append((got.double() - want).norm() / want.norm())
    worst = torch.stack(ratios).max().clamp_min(1e-30)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    snr = -20 * float(worst.log10())
    return f"{snr:.0f} dB" if snr > _SNR_DB else f"WRONG: {snr:.0f} dB"


def _clock(run: Callable[[], Any], device: torch.device) -> float:
    """The slowest rank's median, in ms; ranks start together each time."""
    samples = []
    for _ in range(_WARM_UP + _SAMPLES):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - start))
    median = torch.tensor(sorted(samples[_WARM_UP:])[_SAMPLES // 2], device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def _served_by(case: _Case) -> str:
    """The backend that attends."""
    q, k, v = (x.transpose(0, 1) for x in (case.q, case.k, case.v))
    request = AttentionRequest.of(q, k, v, AttentionOptions(scale=1.0, mask=case.mask), bias=None, sinks=None)
    return default_registry().select("attention", request, None).name


if __name__ == "__main__":
    main()
