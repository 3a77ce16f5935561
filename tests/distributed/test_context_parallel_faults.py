"""Ring attention when messages are late, when it overlaps, and when it is broken on purpose: each mutant must be noticed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Pending
from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.functional.context_parallel import merge, ring, schedule, sequences, ulysses
from primus_turbo_plugin.functional.context_parallel.sequences import Run
from primus_turbo_plugin.kernels.attention import AttentionMask
from primus_turbo_plugin.kernels.reference import attention as reference
from tests.distributed.context_parallel_cases import check_against_one_rank, inputs, over_all
from tests.support.distributed import RankInfo, ranks

_exchange = ring.exchange


class Late:
    """Messages start up to 10 ms late, in their order, and buffers hold NaN until they arrive."""

    def __init__(self, seed: int) -> None:
        self._worker = ThreadPoolExecutor(1)
        self._chance = random.Random(seed)
        self.waits: Callable[[Any], Any] = lambda message: message.result().wait()

    def __call__(self, sent: Tensor, receiver: int, received: Tensor, sender: int, group: Any) -> Pending[Any]:
        received.fill_(torch.nan)
        delay = self._chance.random() * 0.01

        def start() -> Pending[Any]:
            time.sleep(delay)
            return _exchange(sent, receiver, received, sender, group)

        message = self._worker.submit(start)

        def wait() -> Any:
            self.waits(message)
            return received

        return Pending(wait)


def check(info: RankInfo, algorithm: Any = "p2p") -> None:
    """A whole causal mask, then a window; a sink in each. Raises on every rank if any finds a difference."""
    problems = 0
    heads = 2 * info.world_size
    for window in ((-1, -1), (6, 0)):
        sinks = torch.randn(heads, dtype=torch.float64)

        def run(q: Tensor, k: Tensor, v: Tensor, context: Any, sinks: Tensor, window: Any = window) -> Tensor:
            return attention(q, k, v, mask=AttentionMask(causal=True, window=window), sinks=sinks, context=context)

        tensors = inputs((16 * info.world_size, 1), torch.float64, heads=heads, groups=1)
        try:
            check_against_one_rank(info, tensors, run, [over_all(algorithm)], sinks=sinks)
        except AssertionError:
            problems += 1
    found = torch.tensor(problems)
    dist.all_reduce(found)
    assert not found, f"{problems} of two differ here, {found.item()} on all ranks"


@ranks(world_size=[2, 4])
def test_late_messages_change_nothing(rank_info: RankInfo) -> None:
    ring.exchange = Late(rank_info.seed + rank_info.rank)
    check(rank_info)
    if rank_info.world_size == 4:
        check(rank_info, "a2a+p2p")


@ranks(world_size=4)
def test_the_next_message_is_under_way_before_a_steps_attention_starts(rank_info: RankInfo) -> None:
    log: list[str] = []
    forward, backward = reference.attention_fwd, reference.attention_bwd

    def exchange(*arguments: Any) -> Pending[Any]:
        log.append("post")
        message = _exchange(*arguments)

        def wait() -> Any:
            log.append("wait")
            return message.wait()

        return Pending(wait)

    def logged(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            log.append(name)
            return function(*arguments, **options)

        return call

    ring.exchange = exchange
    reference.attention_fwd, reference.attention_bwd = logged("fwd", forward), logged("bwd", backward)
    q = torch.randn(32, 1, 2, 4, requires_grad=True)
    out = attention(q, q, q, mask=AttentionMask(causal=True), context=over_all())
    assert log == ["post", "fwd", "wait", "post", "fwd", "wait", "post", "fwd", "wait", "fwd"]
    log.clear()
    out.sum().backward()
    # Keys of the next step, then the step's attention, then the step's gradients home, which are awaited a step later.
    assert log == [
        "post",
        "bwd",
        "wait",
        "post",
        "bwd",
        "post",
        "wait",
        "post",
        "bwd",
        "wait",
        "post",
        "wait",
        "bwd",
        "wait",
        "post",
        "wait",
    ]


def no_wait(late: Late) -> None:
    """Nobody waits before the comparison; gloo would not survive it if nobody ever did."""
    started: list[Any] = []
    late.waits = started.append
    all_reduce = dist.all_reduce

    def after_all_messages(x: Tensor) -> Any:
        while started:
            started.pop(0).result().wait()
        return all_reduce(x)

    dist.all_reduce = after_all_messages


def wrong_weight(late: Late) -> None:
    """The part's weight from the accumulated lse, not from the total."""
    add = merge.Merged.add
    merge.Merged.add = lambda self, rows, out, lse: add(self, rows, out, lse + 0.01)  # type: ignore[method-assign]


def overwritten_instead_of_merged(late: Late) -> None:
    merge.Written.any_of = lambda self, rows: False  # type: ignore[method-assign]


def sink_twice(late: Late) -> None:
    add_sinks = merge.Merged.add_sinks
    merge.Merged.add_sinks = lambda self, sinks: (add_sinks(self, sinks), add_sinks(self, sinks))  # type: ignore


def sink_forgotten(late: Late) -> None:
    merge.Merged.add_sinks = lambda self, sinks: None  # type: ignore[method-assign]


def wrong_chunk(late: Late) -> None:
    """Chunks r and size + r, as without the zig-zag."""

    def held(sequence: Any, rank: int, size: int) -> tuple[Run, ...]:
        chunk = sequence.room // (2 * size)
        return Run(rank * chunk, 0, chunk), Run((size + rank) * chunk, chunk, chunk)

    schedule.held = held


def causal_off_by_one(late: Late) -> None:
    visible = schedule.visible
    schedule.visible = lambda query, key, limits: visible(replace(query, position=query.position + 1), key, limits)


def gradients_not_collected(late: Late) -> None:
    ring.Ring._collect = lambda self, own, homecoming: None if homecoming is None else homecoming[1].wait()  # type: ignore


def delta_of_a_part(late: Late) -> None:
    plain = reference.attention_bwd
    reference.attention_bwd = lambda *a, delta=None, **o: plain(*a, **o)  # type: ignore[assignment]
    import tests.distributed.context_parallel_cases as cases

    cases._delta_from_output = reference.attention_bwd  # type: ignore[assignment]


MUTANTS = [
    no_wait, wrong_weight, overwritten_instead_of_merged, sink_twice, sink_forgotten, wrong_chunk, causal_off_by_one,
    gradients_not_collected, delta_of_a_part,
]  # fmt: skip


@ranks(world_size=2, timeout_s=30)
@pytest.mark.parametrize("mutant", [mutant.__name__ for mutant in MUTANTS])
def test_a_broken_ring_is_noticed(rank_info: RankInfo, mutant: str) -> None:
    """A test that passes with any of these would prove nothing."""
    late = ring.exchange = Late(rank_info.rank)
    schedule.ring_schedule.cache_clear()
    next(m for m in MUTANTS if m.__name__ == mutant)(late)
    with pytest.raises(AssertionError):
        check(rank_info)


@ranks(world_size=2)
def test_broken_heads_and_tokens_are_noticed(rank_info: RankInfo) -> None:
    """Under an all-to-all: tokens left in the order of the ranks, and the neighbour's sinks."""
    order = sequences.gathered_order
    ulysses.gathered_order = lambda *arguments: order(*arguments).sort().values
    with pytest.raises(AssertionError):
        check(rank_info, "a2a")
    ulysses.gathered_order = order
    check(rank_info, "a2a")
    ulysses.AllToAll._own_heads = property(lambda self: slice(0, self.heads // self.group.size()))  # type: ignore
    with pytest.raises(AssertionError):
        check(rank_info, "a2a")
