"""Ranks that have chosen differently are told so by name, without a collective and without waiting."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist

from primus_turbo_plugin.communication.agreement import agree
from primus_turbo_plugin.errors import ConfigError
from tests.support.distributed import RankInfo, ranks


def _said(rank_info: RankInfo, mine: dict[str, str], topic: str) -> list[str | None]:
    """What every rank's error was."""
    error: str | None = None
    try:
        agree(topic, mine)
    except ConfigError as raised:
        error = str(raised)
    errors: list[str | None] = [None] * rank_info.world_size
    dist.all_gather_object(errors, error)
    return errors


@ranks(world_size=[2, 3])
def test_one_rank_that_differs_is_found_and_both_are_named(rank_info: RankInfo) -> None:
    odd = rank_info.world_size - 1
    for first in range(rank_info.world_size):  # whoever comes first
        mine = {"same": "x", "gemm": "triton" if rank_info.rank == odd else "torch"}
        time.sleep(0.0 if rank_info.rank == first else 0.3)
        errors = _said(rank_info, mine, f"kernels {first}")
        told = [rank for rank, error in enumerate(errors) if error is not None]
        assert told == (list(range(odd)) if first == odd else [odd])
        for rank in told:
            message = errors[rank]
            assert message is not None
            assert f"differ in kernels {first}." in message
            assert f"rank {first} on " in message
            assert f"rank {rank} on " in message
            for words in ("gemm: triton", "gemm: torch", "PRIMUS_TURBO_TUNING", "doctor"):
                assert words in message
            assert "same: x" not in message


@ranks(world_size=2)
def test_ranks_that_agree_go_on_and_may_decide_anew(rank_info: RankInfo) -> None:
    for answer in ("a", "b", "a", "b", "c"):
        assert _said(rank_info, {"k": answer}, "topic") == [None, None]
    for _ in range(2):  # a difference stays one, however often it is asked about
        errors = _said(rank_info, {"k": f"rank {rank_info.rank}"}, "topic")
        assert sum(error is not None for error in errors) == 1
    assert _said(rank_info, {"k": "d"}, "topic") == [None, None]


@ranks(world_size=2)
def test_nobody_waits_for_a_rank_that_never_asks(rank_info: RankInfo) -> None:
    """A pipeline stage without such a layer."""
    if rank_info.rank == 0:
        start = time.monotonic()
        agree("only here", {"k": "v"})
        assert time.monotonic() - start < 5.0


@ranks(world_size=2)
def test_the_store_is_asked_once_for_an_answer(rank_info: RankInfo) -> None:
    """Nothing is exchanged in later forwards."""
    store = dist.distributed_c10d._get_default_store()
    agree("topic", {"k": "v"})
    before = store.num_keys()
    dist.barrier()
    start = time.monotonic()
    for _ in range(1000):
        agree("topic", {"k": "v"})
    assert time.monotonic() - start < 1.0
    assert store.num_keys() == before


@ranks(world_size=2)
def test_a_job_that_is_over_is_forgotten(rank_info: RankInfo, tmp_path: Path) -> None:
    """A store that is held on to keeps its port."""
    store = weakref.ref(dist.distributed_c10d._get_default_store())
    agree("topic", {"k": "v"})
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert store() is None
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/second", rank=rank_info.rank, world_size=rank_info.world_size
    )
    assert _said(rank_info, {"k": "w"}, "topic") == [None, None]


@ranks(world_size=1)
def test_a_job_of_one_asks_nobody(rank_info: RankInfo) -> None:
    agree("topic", {"k": "a"})
    assert not dist.distributed_c10d._get_default_store().check(["primus_turbo_plugin/agreement"])


def test_without_a_job_there_is_nothing_to_agree_on() -> None:
    if dist.is_initialized():
        pytest.skip("another test left a process group")
    agree("topic", {"k": "a"})
