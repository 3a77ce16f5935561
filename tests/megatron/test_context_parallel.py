"""Context parallelism: half the sequence a rank, the same losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.test_models import MLA, MOE
from tests.megatron.tiny_gpt import Job, relative_difference, train
from tests.support.distributed import RankInfo, ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize(
    "model",
    [{}, {"qk_layernorm": True, "num_query_groups": None}, MLA, {**MOE, "moe_aux_loss_coeff": 0.0}],
    ids=["dense", "qk_norm", "mla", "moe"],
)
def test_two_context_parallel_ranks_equal_one(rank_info: RankInfo, model: dict[str, Any]) -> None:
    """Each rank's loss is of its own tokens: their mean is the loss of the whole sequence."""
    job = Job(model=model, steps=5, seed=rank_info.seed)
    whole = train(job.but(micro_batches=2))
    both = train(job.but(context=2, micro_batches=4))
    assert relative_difference(_mean(both.losses), _mean(whole.losses)) <= 1e-5
    assert relative_difference(both.gradient_norms, whole.gradient_norms) <= 1e-4


def _mean(history: list[list[float]]) -> list[list[float]]:
    means = torch.tensor([[sum(step) / len(step)] for step in history], dtype=torch.float64)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()
