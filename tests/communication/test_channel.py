"""What a channel keeps and lets go of: memory that grows, plans, traces, flags."""

from __future__ import annotations

import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from primus_turbo_plugin.communication import executor
from primus_turbo_plugin.communication.overlap import Overlap, Payload
from primus_turbo_plugin.communication.schedules.program import Program
from primus_turbo_plugin.communication.tracing import Tracer
from primus_turbo_plugin.communication.transports.watchdog import group_timeout_s
from primus_turbo_plugin.errors import UnsupportedError
from tests.communication.test_executor import TRANSPORTS, _open, _times
from tests.support.distributed import RankInfo, ranks

K = 8


@ranks(world_size=2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_smaller_slots_are_gone_before_larger_ones_are_made(rank_info: RankInfo, transport: str) -> None:
    """Their memory is what the larger ones may need."""
    overlap = Overlap(_open(transport))
    allocate, old, alive = overlap.transport.allocate, [], []

    def watched(nbytes: int) -> Any:
        alive.append([arena() for arena in old if arena() is not None])
        arena = allocate(nbytes)
        old.append(weakref.ref(arena.mine))
        return arena

    overlap.transport.allocate = watched  # type: ignore[method-assign]
    for rows in (64, 128, 64, 256):
        (whole,) = overlap.start_gather(Payload.plain(torch.full((rows, K), float(rank_info.rank)))).wait()
        assert torch.equal(whole[:, 0], torch.tensor([0.0, 1.0]).repeat_interleave(rows))
        del whole
    assert alive == [[], [], []]
    overlap.transport.close()


@ranks(world_size=2)
def test_plans_of_ever_changing_shapes_do_not_pile_up(rank_info: RankInfo) -> None:
    """Nor do those that are thrown away take anything along that a later call needs."""
    executor._MOST_PLANS = 5
    overlap, size = Overlap(_open("shared_memory"), chunks=2), rank_info.world_size
    w = torch.eye(K)
    for rows in (*range(1, 20), *range(19, 0, -1)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):  # one program, rows of other sizes
            xs = [torch.full((rows, K), float(rows + rank)).to(dtype) for rank in range(size)]
            y = torch.full((rows * size, K), torch.nan)
            overlap.gather_gemm(Payload.plain(xs[rank_info.rank]), _times(w), y, K)
            assert torch.equal(y, torch.cat(xs).float()), (rows, dtype)
            assert len(overlap._gathers._plans) <= 5
    overlap.transport.close()


@ranks(world_size=1)
def test_the_groups_own_timeout_is_how_long_a_gpu_may_wait(rank_info: RankInfo) -> None:
    group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=33))
    assert group_timeout_s(group) == 33.0


@ranks(world_size=2)
def test_calls_that_are_captured_leave_no_marks_in_a_trace(rank_info: RankInfo, tmp_path: Path) -> None:
    """An event within a graph has no time that could be read when the trace is written."""
    overlap = Overlap(_open("shared_memory"), tracer=Tracer(tmp_path, first=1, last=1))
    x, y = torch.ones(2, K), torch.empty(4, K)
    overlap.gather_gemm(Payload.plain(x), _times(torch.eye(K)), y, K, label="eager")
    overlap.transport.capture_id = lambda: 7  # type: ignore[method-assign]
    overlap.gather_gemm(Payload.plain(x), _times(torch.eye(K)), y, K, label="captured")
    tracer = overlap._gathers.tracer
    assert tracer is not None
    assert [span.label for span in tracer._spans] == ["eager"]
    overlap.transport.close()


@ranks(world_size=1)
def test_more_flags_than_there_are_is_an_error_with_the_remedy(rank_info: RankInfo) -> None:
    overlap = Overlap(_open("shared_memory"))
    many = Program(rank=0, world_size=32, start=(), finish=(), slot_rows=(1,), num_lanes=1, num_flags=128)
    x = Payload.plain(torch.ones(1, K))
    with pytest.raises(UnsupportedError, match=r"32 ranks of a ring need 128 flags .* communication.chunks to 2"):
        overlap._gathers.start((many,), x.planes, x.forms)
    overlap.transport.close()
