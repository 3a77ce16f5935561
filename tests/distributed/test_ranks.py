"""The harness itself: a distributed test that cannot fail would make every other one worthless."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import RankInfo, ranks, run_ranks


@ranks(world_size=[1, 2, 3])
@pytest.mark.parametrize("value", [5, 7])
def test_ranks_are_real_processes_that_talk(rank_info: RankInfo, value: int) -> None:
    total = torch.tensor([value * (rank_info.rank + 1)])
    dist.all_reduce(total)
    assert total.item() == value * sum(range(1, rank_info.world_size + 1))
    pids: list[int | None] = [None] * rank_info.world_size
    dist.all_gather_object(pids, os.getpid())
    assert len(set(pids)) == rank_info.world_size


def _body(function):  # what @ranks attaches, for bodies that are not tests themselves
    function._ranks_body = function
    return function


@_body
def _fails_on_rank_1(rank_info: RankInfo) -> None:
    if rank_info.rank == 1:
        raise ValueError("planted on rank 1")
    dist.barrier()


@_body
def _hangs(rank_info: RankInfo) -> None:
    time.sleep(60)


@_body
def _dies(rank_info: RankInfo) -> None:
    if rank_info.rank == 0:
        os._exit(9)
    time.sleep(60)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_fails_on_rank_1", "rank 1 of 2 failed(.|\n)*planted on rank 1"),
        ("_hangs", r"ranks \[0, 1\] of 2 did not end within"),
        ("_dies", "rank 0 of 2 died"),
    ],
)
def test_a_rank_that_fails_hangs_or_dies_fails_the_test(name: str, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=words):
        run_ranks(__name__, name, 2, {}, seed=0, timeout_s=8.0, megatron=False)
    assert time.monotonic() - start < 30


@_body
def _skips_on_rank_0(rank_info: RankInfo) -> None:
    if rank_info.rank == 0:
        pytest.skip("planted")
    raise ValueError("planted on rank 1")


@_body
def _skips(rank_info: RankInfo) -> None:
    pytest.skip("nothing to do here")


def test_a_skip_hides_no_failure() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2 failed|1 of 2 ranks skipped"):
        run_ranks(__name__, "_skips_on_rank_0", 2, {}, seed=0, timeout_s=30.0, megatron=False)
    with pytest.raises(pytest.skip.Exception, match="nothing to do here"):
        run_ranks(__name__, "_skips", 2, {}, seed=0, timeout_s=30.0, megatron=False)
