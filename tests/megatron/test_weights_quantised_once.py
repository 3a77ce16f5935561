"""In a whole model, under Megatron's schedules: weights are quantised once a schedule, and no write to them is missed.

Every copy that a cache gives out is compared, bit for bit, with a fresh quantisation of the weight as it is at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from primus_turbo_plugin.functional.weight_cache import WeightCache
from tests.megatron import tiny_gpt
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron

MXFP4 = {"precision": "mxfp4"}


class _Watch:
    """Copies asked for and made since the last `take`, by cache."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}
        self.made: dict[int, int] = {}

    def take(self) -> tuple[int, set[int]]:
        """(how many caches were asked, how often each of them quantised)."""
        counts = {self.made.get(cache, 0) for cache in self.asked}
        asked = len(self.asked)
        self.asked, self.made = {}, {}
        return asked, counts


@contextmanager
def _watched() -> Iterator[_Watch]:
    watch, copies = _Watch(), WeightCache.copies

    def checked(
        self: WeightCache, weight: Any, dtype: Any, quantize: Callable[..., Any], *, row: bool, column: bool
    ) -> Any:
        def counted(with_row: bool, with_column: bool) -> Any:
            watch.made[id(self)] = watch.made.get(id(self), 0) + 1
            return quantize(with_row, with_column)

        watch.asked[id(self)] = watch.asked.get(id(self), 0) + 1
        given = copies(self, weight, dtype, counted, row=row, column=column)
        for copy, fresh in zip(given, quantize(row, column)):
            if copy is not None and fresh is not None:
                assert torch.equal(copy.data, fresh.data), "a stale copy of a weight was used"
                assert torch.equal(copy.block_scale, fresh.block_scale), "a stale copy of a weight was used"
        return given

    WeightCache.copies = checked  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        WeightCache.copies = copies  # type: ignore[method-assign]


def _linears(models: list[Any]) -> list[Any]:
    return [
        module for model in models for module in model.modules() if getattr(module, "_weight_cache", None) is not None
    ]


JOBS = {
    "plain": tiny_gpt.Job(turbo=MXFP4, steps=2, micro_batches=3),
    "virtual pipeline": tiny_gpt.Job(
        turbo=MXFP4, steps=2, micro_batches=4, pipeline=2, virtual=2, model={"num_layers": 4}, bf16=True
    ),
    "distributed optimizer": tiny_gpt.Job(turbo=MXFP4, steps=2, micro_batches=3, bf16=True, distributed_optimizer=True),
    "recompute": tiny_gpt.Job(
        turbo=MXFP4, steps=2, micro_batches=2,
        model={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "hybrid": tiny_gpt.Job(turbo=MXFP4, steps=2, micro_batches=3, hybrid="*-*-", model={"num_layers": 4}),
    "prediction": tiny_gpt.Job(turbo=MXFP4, steps=2, micro_batches=3, model={"mtp_num_layers": 1}),
}  # fmt: skip


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("name", JOBS)
def test_once_a_schedule_from_the_first_step_on(rank_info: RankInfo, name: str) -> None:
    job = JOBS[name]
    with _watched() as watch:
        result = tiny_gpt.train(job.but(steps=1))
        outside = (
            1 if name == "prediction" else 0
        )  # eh_proj lies beside MTP's layer: the optimizer clock announces to it
        for step in range(3):
            asked, counts = watch.take()
            assert counts == {1}, (step, counts)
            assert asked >= len(_linears(result.models)) - outside
            tiny_gpt.run_steps(job.but(steps=1, first_step=1 + step), result.config, result.models, result.optimizer)


@ranks(world_size=1, megatron=True)
def test_weights_rewritten_through_data_between_schedules_are_seen_without_an_optimizer_step(
    rank_info: RankInfo,
) -> None:
    """As when weights are averaged, restored or reset by hand in the middle of training."""
    job = tiny_gpt.Job(turbo=MXFP4, steps=2, micro_batches=3, bf16=True)
    with _watched() as watch:
        result = tiny_gpt.train(job)
        config, models = result.config, result.models
        quiet = _NoStep(result.optimizer)
        for _ in range(2):
            for linear in _linears(models):
                linear.weight.data.mul_(-1.5)
            watch.take()
            tiny_gpt.run_steps(job.but(steps=1), config, models, quiet)  # each forward checks itself
            asked, counts = watch.take()
            assert asked == len(_linears(models))
            assert counts == {1}


class _NoStep:
    """An optimizer that skips its step, as Megatron's does when gradients overflow."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> tuple[bool, float, int]:
        return True, 0.0, 0


@ranks(world_size=1, megatron=True)
def test_a_forward_outside_schedules_in_the_other_mode_quantises_afresh(rank_info: RankInfo) -> None:
    """Averaged weights, swapped in through `.data` for an evaluation that no schedule runs."""
    job = tiny_gpt.Job(turbo=MXFP4, steps=2, micro_batches=2)
    with _watched() as watch:
        result = tiny_gpt.train(job)
        model = result.models[0]
        model.eval()
        watch.take()
        tokens = torch.randint(tiny_gpt.VOCAB, (1, tiny_gpt.SEQ))
        positions = torch.arange(tiny_gpt.SEQ)[None]
        with torch.no_grad():
            before = model(tokens, positions, None)
            for linear in _linears(result.models):
                linear.weight.data.mul_(-1.5)
            after = model(tokens, positions, None)
        assert watch.take() == (0, set()), "no cache was asked"
        assert not torch.equal(before, after)
        model.train()
        tiny_gpt.run_steps(job.but(steps=1), result.config, result.models, result.optimizer)
        assert watch.take()[1] == {1}
