"""The sdma transport on GPUs: two ranks on two, or on one, where IPC memory stands in for a peer's."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.communication import schedules
from primus_turbo_plugin.communication.executor import Channel, Form
from primus_turbo_plugin.communication.overlap import Overlap, Payload
from primus_turbo_plugin.communication.rank_sum import rank_sum
from primus_turbo_plugin.communication.tracing import Tracer
from primus_turbo_plugin.communication.transports.device_api import device_api
from primus_turbo_plugin.communication.transports.engine_probe import COMPUTE_UNITS, COPY_ENGINE, probe_engine
from primus_turbo_plugin.communication.transports.sdma import SdmaTransport
from primus_turbo_plugin.diagnostics.trace.analysis import chrome_trace, read_ranks, rows, table
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall, OverlapUse, TensorParallel
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="sdma moves GPU tensors; torch sees no GPU")

K, N = 256, 512


def _device(info: RankInfo) -> torch.device:
    device = torch.device("cuda", info.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@ranks(world_size=2, timeout_s=110)
@pytest.mark.parametrize("signal_by", ["copy", "write"])
@pytest.mark.parametrize("waits_in_stream", [True, False])
def test_rows_arrive_under_random_delays(rank_info: RankInfo, signal_by: str, waits_in_stream: bool) -> None:
    """Back to back, of changing shapes; inputs overwritten at once; sequence numbers beyond the table's first part."""
    device, size, rank = _device(rank_info), rank_info.world_size, rank_info.rank
    transport = SdmaTransport(torch.distributed.group.WORLD, device, signal_by=signal_by, probe=False)  # type: ignore[arg-type]
    transport._waits_in_stream &= waits_in_stream
    g, dice = torch.Generator().manual_seed(rank_info.seed), random.Random(rank)
    gathers, scatters = Channel(transport), Channel(transport)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=g).bfloat16().to(device)

    def pause(cycles: float) -> None:
        if dice.random() < 0.3:
            torch.cuda._sleep(int(dice.random() * cycles))

    for case in range(12):
        if case == 6:
            torch.cuda.synchronize()
            torch.distributed.barrier()
            gathers._sequence = (1 << 16) - 3
        rows = tuple(int(n) for n in torch.randint(0, 200, (size,), generator=g))
        w, xs, parts = integers(N, K), [integers(n, K) for n in rows], [integers(sum(rows), K) for _ in range(size)]

        def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None, w: Tensor = w) -> None:
            pause(2e6)
            torch.mm(planes[0], w.t(), out=out)

        x, y = xs[rank].clone(), torch.full((sum(rows), N), torch.nan, dtype=torch.bfloat16, device=device)
        programs = tuple(
            schedules.all_gather_gemm(r, rows, chunks=1 + case % 3, keep=bool(case % 2)) for r in range(size)
        )
        pause(4e6)
        call = gathers.start(programs, [x], (Form.of(x),), multiply=multiply, output=y)
        (slot,) = gathers.finish(call)
        x.fill_(torch.nan)
        kept = slot.clone()
        part, out = parts[rank].clone(), torch.full((rows[rank], N), torch.nan, dtype=torch.bfloat16, device=device)
        programs = tuple(schedules.gemm_reduce_scatter(r, rows, chunks=1 + case % 3) for r in range(size))
        call = scatters.start(
            programs,
            [part],
            (Form.of(out),),
            input_forms=(Form.of(part),),
            multiply=multiply,
            partial=out.new_empty(sum(rows), N),
            output=out,
        )
        scatters.finish(call)
        part.fill_(torch.nan)
        whole = torch.cat(xs)
        assert torch.equal(y, whole @ w.t()), case
        assert case % 2 == 0 or torch.equal(kept, whole), case
        products = [(p @ w.t()).split(rows)[rank].float() for p in parts]
        assert torch.equal(out, sum(products[1:], products[0]).bfloat16()), case


@ranks(world_size=2, timeout_s=60)
def test_bulk_collectives_under_other_work(rank_info: RankInfo) -> None:
    device, size, rank = _device(rank_info), rank_info.world_size, rank_info.rank
    overlap = Overlap(SdmaTransport(torch.distributed.group.WORLD, device, probe=False))
    for call in range(10):
        x = torch.full((512, 256), float(call * size + rank), dtype=torch.bfloat16, device=device)
        pending = overlap.start_gather(Payload.plain(x))
        torch.cuda._sleep(10**6 * (1 + rank))
        (gathered,) = pending.wait()
        sums = overlap.start_scatter(gathered * 1.0)
        torch.cuda._sleep(10**5)
        expected = torch.arange(size, device=device).add(call * size).bfloat16()
        assert torch.equal(gathered, expected.repeat_interleave(512)[:, None].expand(-1, 256))
        assert torch.equal(sums.wait(), torch.full_like(x, float(size * (call * size + rank))))


@ranks(world_size=2, timeout_s=60)
def test_a_trace_shows_every_copy_and_product_of_both_ranks(rank_info: RankInfo, tmp_path: Path) -> None:
    """Marks are events on the lanes: a gather under compute is hidden, one that is awaited at once is not.

    Compute is ahead of nothing: it is given 10 ms before a step, so that the GPU and not the host decides what runs under what.
    """
    device = _device(rank_info)
    tracer = Tracer(tmp_path, first=2, last=2)
    overlap = Overlap(SdmaTransport(torch.distributed.group.WORLD, device, probe=False), tracer=tracer, chunks=2)
    step = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step
    x, w = (torch.ones(2048, 512, dtype=torch.bfloat16, device=device) for _ in range(2))
    y, out = x.new_empty(4096, 2048), x.new_empty(1024, 2048)

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        torch.mm(planes[0], w.t(), out=out)

    for _ in range(3):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        torch.cuda._sleep(2 * 10**7)
        pending = overlap.start_gather(Payload.plain(x), label="hidden")
        torch.cuda._sleep(2 * 10**7)
        pending.wait()
        overlap.start_gather(Payload.plain(x), label="bare").wait()
        overlap.gather_gemm(Payload.plain(x), multiply, y, 512, label="fprop")
        overlap.gemm_scatter(Payload.plain(x), multiply, out, 512, label="scatter")
        step()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    ranks_seen = read_ranks(tmp_path)
    found = {row.name: row for row in rows(ranks_seen)}
    assert list(found) == ["hidden", "bare", "fprop", "scatter"]
    assert all(row.calls == 1 and row.copy_ms > 0 for row in found.values()), found
    assert found["hidden"].nbytes == found["bare"].nbytes == found["fprop"].nbytes == x.nbytes
    assert found["scatter"].nbytes == out.nbytes
    assert found["hidden"].hidden > 0.9 > 0.5 > found["bare"].hidden, found
    events = [e for e in chrome_trace(ranks_seen)["traceEvents"] if e["ph"] == "X"]
    for rank in range(2):
        named = [e["name"] for e in events if e["pid"] == rank and "(fprop)" in e["name"]]
        assert sum("put to rank" in name for name in named) == 2, named
        assert sum("gemm" in name for name in named) == 3, named
    assert all(e["ts"] >= 0 and 0 <= e["dur"] < 6e7 for e in events)
    if rank_info.rank == 0:
        print(table(list(found.values())))
        print(len(json.dumps(events)), "bytes of events")


@ranks(world_size=2, timeout_s=60)
@pytest.mark.parametrize("signal_by", ["copy", "write"])
@pytest.mark.parametrize("waits_in_stream", [True, False])
def test_captured_collectives_are_replayed_among_eager_ones(
    rank_info: RankInfo, signal_by: str, waits_in_stream: bool
) -> None:
    """Two graphs of an odd number of calls, in an order of their own, with other inputs each time and delays in between."""
    device, size, rank = _device(rank_info), rank_info.world_size, rank_info.rank
    transport = SdmaTransport(torch.distributed.group.WORLD, device, signal_by=signal_by, probe=False)  # type: ignore[arg-type]
    transport._waits_in_stream &= waits_in_stream
    overlap = Overlap(transport, chunks=2)
    g, dice = torch.Generator().manual_seed(rank_info.seed), random.Random(rank_info.seed)
    w = torch.randint(-4, 5, (N, K), generator=g).bfloat16().to(device)
    xs, parts = torch.zeros(64, K, device=device).bfloat16(), torch.zeros(64 * size, K, device=device).bfloat16()
    y, out, kept = xs.new_empty(64 * size, N), xs.new_empty(64, N), xs.new_empty(64 * size, K)

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        torch.mm(planes[0], w.t(), out=out) if add is None else torch.addmm(add, planes[0], w.t(), out=out)

    def gathers() -> None:
        overlap.gather_gemm(Payload.plain(xs), multiply, y, K)

    def everything() -> None:
        overlap.gemm_scatter(Payload.plain(parts), multiply, out, K, can_add=True)
        pending = overlap.start_gather(Payload.plain(xs))
        gathers()
        kept.copy_(pending.wait()[0])

    with pytest.raises(UnsupportedError, match="Run the same shapes once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gathers()
    everything()
    torch.cuda.synchronize()
    graphs = []
    for body in (gathers, everything):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            body()
    for case in range(24):
        shares = [torch.randint(-4, 5, (64, K), generator=g).bfloat16() for _ in range(size)]
        wholes = [torch.randint(-4, 5, (64 * size, K), generator=g).bfloat16() for _ in range(size)]
        xs.copy_(shares[rank])
        parts.copy_(wholes[rank])
        for t in (y, out, kept):
            t.fill_(torch.nan)
        if dice.random() < 0.3:
            torch.cuda._sleep(int(random.random() * 4e6))
        which = dice.choice(["gathers", "everything", "eager"])
        {"gathers": graphs[0].replay, "everything": graphs[1].replay, "eager": everything}[which]()
        x = torch.cat(shares).to(device)
        assert torch.equal(y, x @ w.t()), (case, which)
        if which != "gathers":
            products = [(whole.to(device) @ w.t()).chunk(size)[rank].float() for whole in wholes]
            assert torch.equal(out, sum(products[1:], products[0]).bfloat16()), (case, which)
            assert torch.equal(kept, x), (case, which)


@ranks(world_size=2, timeout_s=60)
def test_a_rank_that_keeps_the_others_gpu_waiting_is_named(rank_info: RankInfo) -> None:
    """The flags are read while compute waits, and products that were issued meanwhile are right."""
    device, rank, said = _device(rank_info), rank_info.rank, io.StringIO()
    overlap = Overlap(SdmaTransport(torch.distributed.group.WORLD, device, probe=False, warn_s=0.5))
    x = torch.full((64, K), float(rank), dtype=torch.bfloat16, device=device)
    overlap.start_gather(Payload.plain(x), label="first").wait()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    with contextlib.redirect_stderr(said):
        if rank == 1:
            time.sleep(2.0)
        (gathered,) = overlap.start_gather(Payload.plain(x), label="second").wait()
        torch.cuda.synchronize()
    assert gathered[:, 0].tolist() == [0.0] * 64 + [1.0] * 64
    torch.distributed.barrier()
    assert ("rank 0: second has waited" in said.getvalue()) == (rank == 0), said.getvalue()
    assert ("for rank 1, last heard of 1 call(s) before this one" in said.getvalue()) == (rank == 0), said.getvalue()


@ranks(world_size=2, timeout_s=60)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_captured_layer_trains_as_an_eager_one(rank_info: RankInfo, recipe: str) -> None:
    """Column- and row-parallel, forward and backward in one graph."""
    device, group, tokens = _device(rank_info), torch.distributed.group.WORLD, 128
    torch.cuda.set_stream(torch.cuda.Stream(device))
    use = OverlapUse(overlap=Overlap(SdmaTransport(group, device, probe=False), chunks=2))
    of = plan(recipe)
    kernels = LinearKernels.select(of, device, torch.bfloat16, wgrad_dtype=torch.bfloat16, accumulate=False)

    def call(mode: str, overlap: OverlapUse | None) -> LinearCall:
        parallel = TensorParallel(mode=mode, group=group, sequence_parallel=True)  # type: ignore[arg-type]
        return LinearCall(plan=of, kernels=kernels, parallel=parallel, overlap=overlap)

    torch.manual_seed(rank_info.seed + rank_info.rank)
    x, dy = (torch.randn(tokens, K, device=device).bfloat16() for _ in range(2))
    w1, w2 = (torch.randn(N, K, device=device).bfloat16() * 0.1 for _ in range(2))
    leaves = [t.requires_grad_() for t in (x, w1, w2.t().contiguous())]

    def step() -> list[Tensor]:
        hidden = linear(leaves[0], leaves[1], None, call("column", use))
        y = linear(hidden, leaves[2], None, call("row", use))
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    for _ in range(2):
        expected = [t.clone() for t in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = step()
    for _ in range(5):
        for t in found:
            t.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))


@ranks(world_size=1)
def test_the_probe_tells_copy_engines_from_kernels(rank_info: RankInfo) -> None:
    device = _device(rank_info)
    device_api()
    source = torch.ones(1 << 22, dtype=torch.uint8, device=device)
    host, target = torch.ones(1 << 22, dtype=torch.uint8, pin_memory=True), torch.zeros_like(source)

    def upload(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            target.copy_(host, non_blocking=True)

    def kernel(stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            torch.add(source, 1, out=target)

    assert probe_engine(upload, device) == COPY_ENGINE
    assert probe_engine(kernel, device) == COMPUTE_UNITS


@ranks(world_size=1)
def test_sums_on_a_gpu_are_those_of_the_reference(rank_info: RankInfo) -> None:
    device = _device(rank_info)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        parts = [torch.randn(77, 33, device=device).mul(10.0**i).to(dtype) for i in range(9)]
        for count in range(1, 10):
            out, expected = torch.empty_like(parts[0]), torch.empty(77, 33, dtype=dtype)
            rank_sum(parts[:count], out)
            rank_sum([part.cpu() for part in parts[:count]], expected)
            assert torch.equal(out.cpu(), expected), (dtype, count)
