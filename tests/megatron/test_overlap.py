"""Whole models, trained through Megatron's schedules with tensor-parallel collectives under the GEMMs and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist

from primus_turbo_plugin.communication import opening
from tests.megatron.tiny_gpt import Job, relative_difference, train
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron


def _fuse(models: list[Any]) -> None:
    """Weight gradients straight into `main_grad`; Megatron's output layer would want Apex for it."""
    for model in models:
        for module in model.modules():
            if hasattr(module, "plan") and hasattr(module, "gradient_accumulation_fusion"):
                module.gradient_accumulation_fusion = True


ON = {"tp_overlap": True, "chunks": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "tp4, 3 micro batches": {"tensor": 4, "micro_batches": 3, "model": {"num_query_groups": 4}},
    "tp2 pp2, recomputed": {"tensor": 2, "pipeline": 2, "model": RECOMPUTED},
    "tp2 dp2, fused wgrad": {
        "tensor": 2,
        "on_model": _fuse,
        "distributed_optimizer": True,
    },
    "tp2 ep2, experts beside a shared one": {
        "tensor": 2,
        "expert": 2,
        "model": {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 32,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": 48,
        },
    },
    "tp2 dp2, mxfp4": {"tensor": 2, "turbo": {"precision": "mxfp4"}, "bf16": True},
}


@ranks(world_size=4, megatron=True, timeout_s=240)
@pytest.mark.parametrize("case", CASES)
def test_overlap_changes_no_loss(rank_info: RankInfo, case: str) -> None:
    """The same additions in the same order but for sums over more than two ranks, and GEMMs of fewer rows at a time."""
    job = Job(sequence_parallel=True, steps=4, seed=rank_info.seed).but(**CASES[case])
    off = train(job)
    on = train(job.but(turbo={**job.turbo, "communication": ON}))
    bound = 2e-2 if job.bf16 else 1e-5
    assert relative_difference(on.losses, off.losses) <= bound
    assert relative_difference(on.gradient_norms, off.gradient_norms) <= 10 * bound
    again = train(job.but(turbo={**job.turbo, "communication": ON}))
    assert again.losses == on.losses, "the same bits run after run"
    for _, overlap in opening._OPEN.values():
        used = [channel._sequence for channel in (overlap._gathers, overlap._bulk, overlap._scatters)]
        assert all(used), used


def _compile_layers(models: list[Any]) -> None:
    """Every attention and MLP of a layer, backward too; what cannot be traced breaks its graph."""
    for model in models:
        for module in model.modules():
            if type(module).__name__ in ("SelfAttention", "MLP"):
                module.compile(backend="aot_eager")


@pytest.mark.slow
@ranks(world_size=2, megatron=True, timeout_s=240)
def test_compiled_layers_overlap_as_others_do(rank_info: RankInfo) -> None:
    """The linears run outside the graphs, forward and backward, and their sequence numbers go on."""
    if torch._dynamo.config.disable:
        pytest.skip("TORCHDYNAMO_DISABLE is set")
    job = Job(tensor=2, sequence_parallel=True, steps=3, seed=rank_info.seed, turbo={"communication": ON})
    plain = train(job)
    opening.close_all()
    with torch.compiler.set_stance("default"):  # the CPU set-up compiles nothing
        compiled = train(job.but(on_model=_compile_layers))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert relative_difference(compiled.losses, plain.losses) <= 1e-6
    assert relative_difference(compiled.gradient_norms, plain.gradient_norms) <= 1e-5
    for _, overlap in opening._OPEN.values():
        used = [channel._sequence for channel in (overlap._gathers, overlap._bulk, overlap._scatters)]
        assert all(used), used


@ranks(world_size=2, megatron=True)
def test_megatrons_own_flag_turns_it_on(rank_info: RankInfo) -> None:
    job = Job(tensor=2, sequence_parallel=True, steps=2, seed=rank_info.seed)
    off = train(job)
    opening.close_all()
    flag = train(job.but(model={"tp_comm_overlap": True, "tp_comm_overlap_disable_fc1": True}))
    assert relative_difference(flag.losses, off.losses) <= 1e-5
    assert len(opening._OPEN) == 1
    linears = {
        module.tp_comm_buffer_name: module
        for model in flag.models
        for module in model.modules()
        if hasattr(module, "tp_comm_buffer_name")
    }
    assert set(linears) == {"qkv", "proj", "fc1", "fc2"}
    assert all(linear.plan.communication.tp_overlap for linear in linears.values())
    assert linears["fc1"].plan.communication.except_for == ("fc1",)
    assert dist.get_world_size() == 2
