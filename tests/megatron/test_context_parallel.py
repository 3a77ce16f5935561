"""Context parallelism: a share of the sequence a rank, by every algorithm the same losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.test_models import MLA, MOE
from tests.megatron.tiny_gpt import Job, relative_difference, train
from tests.support.distributed import RankInfo, ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


def _lists_are_shifted() -> bool:
    from primus_turbo_plugin.specs import compat

    return compat.facts().cp_comm_type_list_is_shifted


def _shared_runs(two_levels: bool) -> Iterator[dict[str, Any]]:
    """Settings of the runs that are compared with the whole one."""
    for algorithm in ("p2p", "all_gather", "a2a"):
        yield {"cp_comm_type": algorithm}
    yield {"cp_comm_type": "p2p", **FULL}
    yield {"cp_comm_type": "a2a", **SELECTIVE}
    if not _lists_are_shifted():
        yield {"cp_comm_type": ["a2a", "p2p"]}
    if two_levels:
        yield {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}


def _equal_one(job: Job, size: int, runs: Iterator[dict[str, Any]]) -> None:
    """Each rank's loss is of its own tokens: their mean is the loss of the whole sequence."""
    whole = train(job.but(micro_batches=2))
    for settings in runs:
        shared = train(job.but(model={**job.model, **settings}, context=size, micro_batches=2 * size))
        assert relative_difference(_mean(shared.losses), _mean(whole.losses)) <= 1e-5, settings
        assert relative_difference(shared.gradient_norms, whole.gradient_norms) <= 1e-4, settings


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize(
    "model",
    [
        {"qk_layernorm": True, "num_query_groups": None, "window_size": (5, 0), "softmax_type": "learnable"},
        MLA,
        {**MOE, "moe_aux_loss_coeff": 0.0},
    ],
    ids=["window_sinks", "mla", "moe"],
)
def test_two_ranks_equal_one_for_every_kind_of_model(rank_info: RankInfo, model: dict[str, Any]) -> None:
    job = Job(model=model, steps=3, seed=rank_info.seed)
    _equal_one(job, 2, iter([{"cp_comm_type": None}, {"cp_comm_type": "a2a"}]))


@ranks(world_size=2, megatron=True)
def test_two_ranks_equal_one_for_every_algorithm(rank_info: RankInfo) -> None:
    """Also under activation recompute, and with another algorithm in every layer."""
    _equal_one(Job(steps=3, seed=rank_info.seed), 2, _shared_runs(two_levels=False))


@ranks(world_size=4, megatron=True)
def test_four_ranks_equal_one_for_every_algorithm(rank_info: RankInfo) -> None:
    """Two groups of keys on four ranks: the all-to-all hands each to two of them."""
    _provide_hierarchical_groups()
    _equal_one(Job(steps=2, seed=rank_info.seed), 4, _shared_runs(two_levels=True))


@ranks(world_size=4, megatron=True)
def test_heads_that_cannot_be_dealt_out_are_named(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.errors import ConfigError

    model = {"num_attention_heads": 6, "num_query_groups": 2, "hidden_size": 48, "cp_comm_type": "a2a"}
    with pytest.raises(
        ConfigError, match=r"core_attention: cp_comm_type=a2a: .* 4 ranks .*6 query heads with 2 key heads"
    ):
        train(Job(model=model, context=4, steps=1))
    with pytest.raises(
        ConfigError, match=r"core_attention: .*a2a\+p2p needs two levels.*hierarchical_context_parallel_sizes"
    ):
        train(Job(model={"cp_comm_type": "a2a+p2p"}, context=4, steps=1))


def _mean(history: list[list[float]]) -> list[list[float]]:
    means = torch.tensor([[sum(step) / len(step)] for step in history], dtype=torch.float64)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


def _provide_hierarchical_groups() -> None:
    """Megatron makes these groups with einops, which is not everywhere; here as its docstring says."""
    from megatron.core import parallel_state

    def make(rank: int, ranks: list[int], sizes: list[int], **_: Any) -> tuple[list[Any], list[Any]]:
        inner = [dist.new_group(ranks[first : first + sizes[0]]) for first in range(0, len(ranks), sizes[0])]
        outer = [dist.new_group(ranks[first :: sizes[0]]) for first in range(sizes[0])]
        place = ranks.index(rank)
        return [inner[place // sizes[0]], outer[place % sizes[0]]], []

    parallel_state.create_hierarchical_groups = make
    start = parallel_state.initialize_model_parallel

    def with_levels(**sizes: Any) -> None:
        levels = [2, 2] if sizes["context_parallel_size"] == 4 else None
        start(**sizes, hierarchical_context_parallel_sizes=levels)

    parallel_state.initialize_model_parallel = with_levels
