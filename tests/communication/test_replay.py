"""Calls that a CUDA graph captures, on CPU processes: steps are recorded, and played again and again with the same numbers.

A real capture (streams, memory operations) is in tests/distributed/test_overlap_sdma.py.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.communication import schedules
from primus_turbo_plugin.communication.executor import Channel, Form
from primus_turbo_plugin.communication.overlap import Overlap, Payload
from primus_turbo_plugin.communication.schedules.program import Signal, Wait
from primus_turbo_plugin.communication.transports.process_group import ProcessGroupTransport
from primus_turbo_plugin.communication.transports.shared_memory import SharedMemoryTransport
from primus_turbo_plugin.errors import UnsupportedError
from tests.communication.test_executor import _delayed, _times
from tests.communication.test_sdma_without_gpu import _transport as fake_transport
from tests.support.distributed import RankInfo, ranks

K, N, ROWS = 8, 4, 3


class _Graph:
    """What was issued while it was captured; `replay` issues it again, without asking the executor anything."""

    def __init__(self, number: int, channels: list[Channel]) -> None:
        self.number, self.channels, self.steps = number, channels, []

    def __enter__(self) -> _Graph:
        for channel in self.channels:
            channel.transport.capture_id = lambda: self.number  # type: ignore[method-assign]
            channel._run = self._record  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        for channel in self.channels:
            channel.transport.__dict__.pop("capture_id", None)
            channel.__dict__.pop("_run", None)

    def _record(self, call: Any, steps: Any, value: int | None = None) -> None:
        self.steps.append((call, steps, call.value if value is None else value))

    def replay(self) -> None:
        for call, steps, value in self.steps:
            call.value = value
            for step in steps:
                step(call)


def _gather(channel: Channel, w: Tensor, x: Tensor, *, ring: bool, chunks: int) -> Tensor:
    """Captured or run: y = AG(x) @ w.T; for a capture x is filled later."""
    size = channel.transport.world_size
    make: Any = schedules.ring_all_gather_gemm if ring else schedules.all_gather_gemm
    programs = tuple(make(r, (ROWS,) * size, chunks=chunks) for r in range(size))
    y = torch.full((ROWS * size, N), torch.nan)
    channel.finish(channel.start(programs, [x], (Form.of(x),), multiply=_times(w), output=y))
    return y


def _scatter(channel: Channel, w: Tensor, x: Tensor, *, ring: bool, chunks: int) -> Tensor:
    size = channel.transport.world_size
    programs = tuple(
        schedules.ring_gemm_reduce_scatter(r, (ROWS,) * size)
        if ring
        else schedules.gemm_reduce_scatter(r, (ROWS,) * size, chunks=chunks)
        for r in range(size)
    )
    y = torch.full((ROWS, N), torch.nan)
    form, partial = Form.of(x), torch.zeros(ROWS * size, N)
    call = channel.start(
        programs, [x], (Form.of(y),), input_forms=(form,), multiply=_times(w), partial=partial, output=y
    )
    channel.finish(call)
    return y


def _refill(kind: str, x: Tensor, g: torch.Generator, size: int, rank: int, w: Tensor) -> Tensor:
    """New inputs of all ranks; this rank's go into x, and what must come out is returned."""
    xs = [torch.randint(-4, 5, x.shape, generator=g).float() for _ in range(size)]
    x.copy_(xs[rank])
    return torch.cat(xs) @ w.t() if kind == "gather" else (sum(xs[1:], xs[0]) @ w.t()).chunk(size)[rank]


@ranks(world_size=[2, 3], timeout_s=60)
@pytest.mark.parametrize("mutant", ["none", "sdma", "no handshake", "flags stay up"])
def test_graphs_are_replayed_in_any_order_among_eager_calls(rank_info: RankInfo, mutant: str, tmp_path: Any) -> None:
    """Odd numbers of calls, so that replays meet in one slot; without the handshake or the clearing, results are wrong."""
    g, size, rank = torch.Generator().manual_seed(rank_info.seed), rank_info.world_size, rank_info.rank
    right = mutant in ("none", "sdma")
    if mutant == "sdma":  # its own flags and clearing, over memory that is mapped
        os.environ["FAKE_FOLDER"] = str(tmp_path)
        moves: Any = fake_transport(random.Random(rank_info.seed).choice(["copy", "write"]))
    else:
        shared = SharedMemoryTransport(torch.distributed.group.WORLD, torch.device("cpu"), limit_s=20 if right else 2)
        moves = _delayed(shared, rank_info)
    channels = {"gather": Channel(moves), "scatter": Channel(moves)}
    make, rows_of = {"gather": _gather, "scatter": _scatter}, {"gather": ROWS, "scatter": ROWS * size}
    w = torch.randint(-3, 4, (N, K), generator=g).float()
    dice = random.Random(rank_info.seed)
    for kind, channel in channels.items():
        x = torch.zeros(rows_of[kind], K)
        make[kind](channel, w, x, ring=False, chunks=1)  # memory must be there before a capture
    if mutant == "flags stay up":
        clear = moves.clear
        moves.clear = lambda arena, flag_set: clear(arena, flag_set) if flag_set == 3 else None  # type: ignore[method-assign]
    if mutant == "no handshake":
        for channel in channels.values():
            channel._handshake = ()
    graphs: list[tuple[_Graph, list[Any]]] = []
    for number, kinds in enumerate((["gather"], ["gather", "scatter", "gather", "gather"], ["scatter"]), start=1):
        with _Graph(number, list(channels.values())) as graph:
            calls = []
            for kind in kinds:
                x = torch.zeros(rows_of[kind], K)
                calls.append((kind, x, make[kind](channels[kind], w, x, ring=number == 3, chunks=number)))
        graphs.append((graph, calls))

    def play(choice: int) -> int:
        """One replay or one eager call; how many of its results are wrong."""
        if choice < 3:
            graph, calls = graphs[choice]
            expected = [_refill(kind, x, g, size, rank, w) for kind, x, _ in calls]
            graph.replay()
            wrong = sum(not torch.equal(y, e) for (_, _, y), e in zip(calls, expected, strict=True))
        else:
            kind = ("gather", "scatter")[choice - 3]
            x = torch.zeros(rows_of[kind], K)
            result = _refill(kind, x, g, size, rank, w)
            wrong = not torch.equal(make[kind](channels[kind], w, x, ring=False, chunks=2), result)
        for _, calls in graphs:
            for _, x, y in calls:
                x.fill_(torch.nan)
                y.fill_(torch.nan)
        return int(wrong)

    wrong = 0
    try:
        for _ in range(40):
            wrong += play(dice.randrange(5))
    except UnsupportedError:  # ranks that wait for each other
        assert not right
        wrong += 1
    total = torch.tensor(wrong)
    torch.distributed.all_reduce(total)
    assert (total.item() == 0) == right, f"{total.item()} wrong results"


def test_every_signal_of_a_call_is_waited_for_in_it() -> None:
    """Or it would raise, after the flags were cleared, one that the next replay takes for its own."""
    for size in range(1, 17):
        rows = tuple((5 * r + size) % 4 for r in range(size))
        for chunks in (1, 2, 3, 4):
            found = [
                [schedules.all_gather_gemm(r, rows, chunks=chunks, lanes=1 + chunks) for r in range(size)],
                [schedules.gemm_reduce_scatter(r, rows, chunks=chunks, lanes=1 + chunks) for r in range(size)],
                [schedules.all_gather(r, rows) for r in range(size)],
                [schedules.reduce_scatter(r, rows) for r in range(size)],
            ]
            if size > 1:
                found += [
                    [schedules.ring_all_gather_gemm(r, rows, chunks=chunks) for r in range(size)],
                    [schedules.ring_all_gather(r, rows) for r in range(size)],
                    [schedules.ring_gemm_reduce_scatter(r, rows) for r in range(size)],
                ]
            for programs in found:
                raised = {(p.rank, op.peer, op.flag) for p in programs for op in p.ops() if isinstance(op, Signal)}
                awaited = {(op.peer, p.rank, op.flag) for p in programs for op in p.ops() if isinstance(op, Wait)}
                assert raised == awaited


@ranks(world_size=2)
def test_what_cannot_be_captured_is_refused(rank_info: RankInfo) -> None:
    group, cpu = torch.distributed.group.WORLD, torch.device("cpu")
    overlap = Overlap(SharedMemoryTransport(group, cpu))
    overlap.transport.capture_id = lambda: 7  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match=r"being captured, and the 2 x 256 bytes .* Run the same shapes once"):
        overlap.start_gather(Payload.plain(torch.ones(2, 4)))
    two_sided = ProcessGroupTransport(group, cpu)
    two_sided.device = torch.device("cuda")
    torch.cuda.is_current_stream_capturing = lambda: True  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"cannot be captured in a CUDA graph. Set 'transport: sdma'"):
        Overlap(two_sided).start_gather(Payload.plain(torch.ones(2, 4)))
