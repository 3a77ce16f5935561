"""Schedules in real processes, with delays thrown in: right results, the same bits every run, and faults that show."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.communication import schedules
from primus_turbo_plugin.communication.executor import Channel, Form
from primus_turbo_plugin.communication.overlap import Overlap, Payload
from primus_turbo_plugin.communication.schedules.program import COMPUTE, Program, Put, Signal
from primus_turbo_plugin.communication.transports.base import Transport
from primus_turbo_plugin.communication.transports.process_group import ProcessGroupTransport
from primus_turbo_plugin.communication.transports.shared_memory import SharedMemoryTransport
from primus_turbo_plugin.errors import UnsupportedError
from tests.support.distributed import RankInfo, ranks

K, N = 16, 8
CPU = torch.device("cpu")
TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "shared_memory": SharedMemoryTransport,
    "process_group": ProcessGroupTransport,
}


def _open(name: str) -> Transport:
    return TRANSPORTS[name](torch.distributed.group.WORLD, CPU)


def _times(w: Tensor) -> Callable[[list[Tensor], Tensor, Tensor | None], None]:
    """The GEMM of the tests: small integers, exact in any order."""

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        product = planes[0].float() @ w.float().t()
        out.copy_(product if add is None else product + add)

    return multiply


def _integers(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-4, 5, shape, generator=rng).to(dtype)


@ranks(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fused_collectives_give_the_plain_ones_result(rank_info: RankInfo, transport: str) -> None:
    """Any rows, chunks and lanes; many calls of changing shape back to back, so that slots are reused and grown."""
    g, size, rank = torch.Generator().manual_seed(rank_info.seed), rank_info.world_size, rank_info.rank
    moves = _open(transport)
    gathers, scatters = Channel(moves), Channel(moves)
    for case in range(24):
        rows = tuple(int(n) for n in torch.randint(0, 7, (size,), generator=g))
        chunks, lanes, keep = 1 + case % 3, 1 + case % size, bool(case % 2)
        w = _integers(g, N, K)
        xs = [_integers(g, n, K) for n in rows]
        whole = torch.cat(xs)
        make: Any = schedules.all_gather_gemm
        ring = case % 4 == 3 and size > 1
        programs = tuple(
            schedules.ring_all_gather_gemm(r, rows, chunks=chunks, keep=keep)
            if ring
            else make(r, rows, chunks=chunks, lanes=lanes, keep=keep, merge=1 + case % 4 if chunks == 1 else 1)
            for r in range(size)
        )
        y = torch.full((sum(rows), N), torch.nan)
        call = gathers.start(programs, [xs[rank]], (Form.of(xs[rank]),), multiply=_times(w), output=y)
        (slot,) = gathers.finish(call)
        assert torch.equal(y, whole @ w.t())
        assert not keep or torch.equal(slot, whole)

        parts = [_integers(g, sum(rows), K) for _ in range(size)]
        expected = sum(part @ w.t() for part in parts).split(rows)[rank]  # type: ignore[union-attr]
        add = size == 2 and case % 2 == 0
        scatter_programs = tuple(
            schedules.ring_gemm_reduce_scatter(r, rows)
            if ring
            else schedules.gemm_reduce_scatter(r, rows, chunks=chunks, lanes=lanes, add=add)
            for r in range(size)
        )
        out = torch.full((rows[rank], N), torch.nan)
        call = scatters.start(
            scatter_programs,
            [parts[rank]],
            (Form.of(out),),
            input_forms=(Form.of(parts[rank]),),
            multiply=_times(w),
            partial=torch.full((sum(rows), N), torch.nan),
            output=out,
        )
        scatters.finish(call)
        assert torch.equal(out, expected)
    moves.close()


@ranks(world_size=[2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_taken_in_rank_order_and_rounded_once(rank_info: RankInfo, transport: str, dtype: torch.dtype) -> None:
    """Bits, not closeness: of values whose sum depends on the order, run after run, with a copy lane delayed."""
    g, size, rank = torch.Generator().manual_seed(rank_info.seed), rank_info.world_size, rank_info.rank
    overlap = Overlap(_delayed(_open(transport), rank_info))
    xs = [torch.randn(size * 6, N, generator=g).mul(10.0**r).to(dtype) for r in range(size)]
    wide = xs[0].float()
    for x in xs[1:]:
        wide = wide + x.float()
    expected = wide.to(dtype).chunk(size)[rank]
    for _ in range(4):
        pending = overlap.start_scatter(xs[rank])
        assert torch.equal(pending.wait(), expected)
        (gathered,) = overlap.start_gather(Payload.plain(xs[rank])).wait()
        assert torch.equal(gathered, torch.cat(xs))
    overlap.transport.close()


def _delayed(transport: Transport, info: RankInfo) -> Transport:
    """The transport with random pauses on its lanes and before its waits, other ones on every rank."""
    dice = random.Random(info.seed * 31 + info.rank)
    put, wait = transport.put, transport.wait

    def slow_put(arena: Any, op: Put, pieces: Any) -> None:
        if isinstance(transport, SharedMemoryTransport) and dice.random() < 0.5:
            pause = dice.random() * 0.004
            transport._engine(op.lane).give("pause", lambda: time.sleep(pause))
        put(arena, op, pieces)

    def slow_wait(arena: Any, lane: int, *rest: Any) -> None:
        if lane == COMPUTE and dice.random() < 0.3:
            time.sleep(dice.random() * 0.006)
        wait(arena, lane, *rest)

    transport.put, transport.wait = slow_put, slow_wait  # type: ignore[method-assign]
    return transport


def _signal_first(program: Program) -> Program:
    import dataclasses

    ops = list(program.start)
    for i in range(len(ops) - 1):
        if isinstance(ops[i], Put) and isinstance(ops[i + 1], Signal):
            ops[i], ops[i + 1] = ops[i + 1], ops[i]
    return dataclasses.replace(program, start=tuple(ops))


@ranks(world_size=4, timeout_s=60)
@pytest.mark.parametrize("mutant", ["none", "missing wait", "signal before data", "one slot", "input reused early"])
def test_faults_of_the_executor_show_in_four_processes(rank_info: RankInfo, mutant: str) -> None:
    """Without the mutant every result is right under the same delays; with it some rank sees a wrong one."""
    from primus_turbo_plugin.communication import executor

    size, rank = rank_info.world_size, rank_info.rank
    moves = _delayed(SharedMemoryTransport(torch.distributed.group.WORLD, CPU), rank_info)
    programs = tuple(schedules.all_gather_gemm(r, (8,) * size, chunks=2) for r in range(size))
    if mutant == "missing wait":
        moves.wait = lambda *_: None  # type: ignore[method-assign]
    elif mutant == "signal before data":
        programs = tuple(_signal_first(p) for p in programs)
    elif mutant == "one slot":
        executor.SLOTS = 1
    elif mutant == "input reused early":
        moves.join = lambda arena, lane: None  # type: ignore[method-assign]
    channel, w = Channel(moves), torch.eye(K)
    wrong = 0
    for call in range(30):
        x = torch.full((8, K), float(call * size + rank + 1))
        y = torch.full((8 * size, K), torch.nan)
        channel.finish(channel.start(programs, [x], (Form.of(x),), multiply=_times(w), output=y))
        expected = torch.arange(size).repeat_interleave(8).add(call * size + 1).float()[:, None].expand(-1, K)
        wrong += not torch.equal(y, expected)
        x.fill_(torch.nan)  # the caller uses its memory for something else
    total = torch.tensor(wrong)
    torch.distributed.all_reduce(total)
    assert (total.item() == 0) == (mutant == "none"), f"{total.item()} wrong results"


@ranks(world_size=2)
def test_codes_and_scales_travel_together(rank_info: RankInfo) -> None:
    """Scales of 32x32 blocks have a row for 32 rows of codes; chunks are cut between blocks."""
    g, rank = torch.Generator().manual_seed(rank_info.seed), rank_info.rank
    rows, block = 96, 32
    codes = [torch.randint(0, 256, (rows, K // 2), generator=g).byte() for _ in range(2)]
    scales = [torch.randint(0, 256, (rows // block, 2), generator=g).byte() for _ in range(2)]
    seen = []

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        assert planes[0].shape[0] == block * planes[1].shape[0]
        seen.append(planes[0].shape[0])
        out.copy_(planes[0].sum(1, keepdim=True) * planes[1].repeat_interleave(block, 0).sum(1, keepdim=True))

    overlap = Overlap(SharedMemoryTransport(torch.distributed.group.WORLD, CPU), chunks=2)
    payload = Payload((codes[rank], scales[rank]), (1, block), rows)
    y = torch.zeros(2 * rows, 1, dtype=torch.int64)
    got_codes, got_scales = overlap.gather_gemm(payload, multiply, y, K, keep=True)
    all_codes, all_scales = torch.cat(codes), torch.cat(scales)
    assert torch.equal(got_codes, all_codes)
    assert torch.equal(got_scales, all_scales)
    assert seen == [96, 64, 32]
    expected = all_codes.sum(1, keepdim=True) * all_scales.repeat_interleave(block, 0).sum(1, keepdim=True)
    assert torch.equal(y, expected)


@ranks(world_size=2)
def test_a_rank_that_never_comes_is_named(rank_info: RankInfo) -> None:
    transport = SharedMemoryTransport(torch.distributed.group.WORLD, CPU, limit_s=0.3)
    if rank_info.rank == 0:
        overlap = Overlap(transport)
        overlap._bulk._arena = transport.allocate(4096)
        overlap._bulk._slot_bytes = 2048
        pending = overlap.start_gather(Payload.plain(torch.ones(2, K)))
        with pytest.raises(UnsupportedError, match=r"rank 0: signal 1 of rank 1 .*did not come within 0.3 s"):
            pending.wait()
    else:
        transport.allocate(4096)


@ranks(world_size=[2, 4])
def test_ring_sums_are_the_same_bits_in_every_run(rank_info: RankInfo) -> None:
    """Taken in the order of the ring, from the owner's right neighbour on, in fp32, and rounded once."""
    g, size, rank = torch.Generator().manual_seed(rank_info.seed), rank_info.world_size, rank_info.rank
    overlap = Overlap(_delayed(_open("shared_memory"), rank_info), ring=True)
    parts = [torch.randn(size * 4, K, generator=g).mul(10.0**r).bfloat16() for r in range(size)]

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        out.copy_(planes[0])

    order = [(rank + 1 + step) % size for step in range(size)]
    total = parts[order[0]].float()
    for sender in order[1:]:
        total = total + parts[sender].float()
    expected = total.bfloat16().chunk(size)[rank]
    for _ in range(4):
        y = torch.full((4, K), torch.nan, dtype=torch.bfloat16)
        overlap.gemm_scatter(Payload.plain(parts[rank]), multiply, y, K)
        assert torch.equal(y, expected)
    overlap.transport.close()


@ranks(world_size=2, timeout_s=30)
def test_a_copy_that_fails_is_raised_where_it_failed(rank_info: RankInfo) -> None:
    """And at once, not when the other rank has waited in vain."""
    transport = SharedMemoryTransport(torch.distributed.group.WORLD, CPU, limit_s=2.0)
    overlap = Overlap(transport)
    overlap.start_gather(Payload.plain(torch.ones(2, K))).wait()
    if rank_info.rank == 0:
        transport._engine(0).give("fault", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    begin = time.monotonic()
    error = ZeroDivisionError if rank_info.rank == 0 else UnsupportedError
    with pytest.raises(error):
        overlap.start_gather(Payload.plain(torch.ones(2, K))).wait()
    assert rank_info.rank or time.monotonic() - begin < 1.5
