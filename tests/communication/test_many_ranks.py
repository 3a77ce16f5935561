"""Eight and sixteen processes: right results under delays, and every byte that the schedules say, no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import overlap_traffic
from primus_turbo_plugin.communication import schedules
from primus_turbo_plugin.communication.executor import Channel, Form
from primus_turbo_plugin.communication.schedules.rows import even_shares
from primus_turbo_plugin.communication.schedules.traffic import traffic
from primus_turbo_plugin.communication.transports.shared_memory import SharedMemoryTransport
from tests.communication.test_executor import _delayed, _integers, _times
from tests.support.distributed import RankInfo, ranks

K, N = 8, 4
many = pytest.mark.parametrize("ring", [False, True], ids=["straight", "ring"])


def _counted(transport: Any, size: int) -> Tensor:
    """Bytes this rank puts to each peer, counted where they are copied."""
    sent, put = torch.zeros(size, dtype=torch.int64), transport.put

    def counting(arena: Any, op: Any, pieces: Any) -> None:
        sent[op.peer] += sum(t.nbytes for _, t in pieces)
        put(arena, op, pieces)

    transport.put = counting
    return sent


@many
@ranks(world_size=[8, 16], timeout_s=120)
def test_fused_collectives_of_many_ranks_under_delays(rank_info: RankInfo, ring: bool) -> None:
    """Indivisible rows, several calls back to back; bytes on every link as `traffic` counts them."""
    g, size, rank = torch.Generator().manual_seed(rank_info.seed), rank_info.world_size, rank_info.rank
    moves = _delayed(SharedMemoryTransport(torch.distributed.group.WORLD, torch.device("cpu"), limit_s=90), rank_info)
    sent = _counted(moves, size)
    gathers, scatters = Channel(moves), Channel(moves)
    expected_sent = torch.zeros(size, dtype=torch.int64)
    for case in range(4):
        rows, chunks = even_shares(3 * size + 5 - 4 * case, size), 1 + case % 2
        w, xs = _integers(g, N, K), [_integers(g, n, K) for n in rows]
        make: Any = schedules.ring_all_gather_gemm if ring else schedules.all_gather_gemm
        programs = tuple(make(r, rows, chunks=chunks) for r in range(size))
        y = torch.full((sum(rows), N), torch.nan)
        gathers.finish(gathers.start(programs, [xs[rank]], (Form.of(xs[rank]),), multiply=_times(w), output=y))
        assert torch.equal(y, torch.cat(xs) @ w.t()), case
        expected_sent += _bytes_to(traffic(programs).links, rank, size, K)

        parts = [_integers(g, sum(rows), K) for _ in range(size)]
        programs = tuple(
            schedules.ring_gemm_reduce_scatter(r, rows)
            if ring
            else schedules.gemm_reduce_scatter(r, rows, chunks=chunks)
            for r in range(size)
        )
        out = torch.full((rows[rank], N), torch.nan)
        call = scatters.start(
            programs,
            [parts[rank]],
            (Form.of(out),),
            input_forms=(Form.of(parts[rank]),),
            multiply=_times(w),
            partial=torch.full((sum(rows), N), torch.nan),
            output=out,
        )
        scatters.finish(call)
        assert torch.equal(out, sum(part @ w.t() for part in parts).split(rows)[rank]), case  # type: ignore[union-attr]
        expected_sent += _bytes_to(traffic(programs).links, rank, size, N)
    assert torch.equal(sent, expected_sent)
    moves.close()


def _bytes_to(links: dict[tuple[int, int], dict[int, int]], rank: int, size: int, width: int) -> Tensor:
    """fp32 bytes from this rank to each peer."""
    return torch.tensor([4 * width * sum(links.get((rank, peer), {}).values()) for peer in range(size)])


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_no_schedule_sends_more_than_it_must(size: int) -> None:
    """But for a ring's sums, which travel in fp32: twice the bytes of bf16, and as many rows."""
    for tokens in (16 * size, 16 * size + 3):
        rows = even_shares(tokens, size)
        for case in overlap_traffic.CASES:
            found = traffic([case.make(rank, rows, 2) for rank in range(size)])
            assert sum(found.out) == sum(found.into) == (size - 1) * tokens
            if case.way == "straight":
                assert len(found.links) == size * (size - 1)
                assert found.most_on_a_link == max(rows)
            else:
                assert set(found.links) == {(rank, (rank + 1) % size) for rank in range(size)}
                assert found.most_in_a_step <= max(rows)
                assert max(found.out) <= tokens - min(rows)


def test_the_table_names_the_ideal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["overlap_traffic", "--ranks", "8", "--tokens", "8192", "--width", "4096"])
    overlap_traffic.main()
    lines = capsys.readouterr().out.splitlines()
    assert "| AG + GEMM | straight | 8 | 56 | 2 | 8.00 | 4.00 | 56.00 | 56.00 | 56.00 | 1.00 |" in lines
    assert "| GEMM + RS | ring | 8 | 8 | 7 | 112.00 | 16.00 | 112.00 | 112.00 | 56.00 | 2.00 |" in lines
