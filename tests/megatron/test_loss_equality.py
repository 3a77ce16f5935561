"""The loss of this package's spec equals that of Megatron's local spec, step by step."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.megatron.tiny_gpt import Job, relative_difference, train
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron

LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.slow
@ranks(world_size=4, megatron=True, timeout_s=400)
@pytest.mark.parametrize(("bf16", "bound"), [(False, 1e-5), (True, 1e-2)], ids=["fp32", "bf16"])
def test_loss_equals_megatrons_local_spec_for_every_tp_pp_and_sp(rank_info: RankInfo, bf16: bool, bound: float) -> None:
    """Megatron's local RMSNorm refuses sequence parallelism, so those runs are compared with the local spec without it."""
    for tensor, pipeline in LAYOUTS:
        job = Job(
            spec="local", tensor=tensor, pipeline=pipeline, bf16=bf16, seed=rank_info.seed, distributed_optimizer=True
        )
        local = train(job)
        for sequence_parallel in [False, True] if tensor > 1 else [False]:
            turbo = train(job.but(spec="turbo", sequence_parallel=sequence_parallel))
            where = f"tp{tensor} pp{pipeline} sp {sequence_parallel}"
            assert relative_difference(turbo.losses, local.losses) <= bound, where
            assert relative_difference(turbo.gradient_norms, local.gradient_norms) <= 10 * bound, where
            assert len(turbo.losses) == (20 if _last_stage(pipeline) else 0)
            if turbo.losses:
                assert sum(turbo.losses[-1]) < 0.95 * sum(turbo.losses[0]), f"{where}: did not learn"


def _last_stage(pipeline: int) -> bool:
    return dist.get_rank() >= dist.get_world_size() - dist.get_world_size() // pipeline
