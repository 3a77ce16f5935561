"""`moe_grouped_gemm`: models with grouped experts train, save and resume as those whose experts run one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.test_checkpoints import _means
from tests.megatron.test_models import GRADIENTS, LOSSES, MOE, SHARED
from tests.megatron.test_recompute import FULL, pretend_transformer_engine, selective
from tests.megatron.tiny_gpt import Job, relative_difference, train
from tests.support.distributed import RankInfo, ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

GROUPED = {"moe_grouped_gemm": True}
CAPACITY = {"moe_expert_capacity_factor": 1.0}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
ONE_EACH = {**MOE, "num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
WIDE: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 128, "moe_ffn_hidden_size": 96}


def same_training(job: Job, **reference: Any) -> None:
    """`job` with grouped experts, and the same with the settings of `reference` and experts one by one."""
    grouped = train(job.but(model={**job.model, **GROUPED}))
    one_by_one = train(job.but(**reference))
    assert relative_difference(grouped.losses, one_by_one.losses) <= LOSSES, job
    assert relative_difference(grouped.gradient_norms, one_by_one.gradient_norms) <= GRADIENTS, job


@ranks(world_size=2, megatron=True)
def test_grouped_experts_train_as_megatrons_local_ones(rank_info: RankInfo) -> None:
    """Both dispatchers that run without a GPU; capacity with and without padding; other dtypes of the router."""
    for model in [
        MOE,
        {**SHARED, "moe_layer_freq": [1, 0], "moe_router_dtype": "fp64", "use_cpu_initialization": False},
        {**MOE, "moe_token_dispatcher_type": "allgather"},
        {**MOE, **CAPACITY, "moe_router_dtype": "fp32"},
        {**MOE, **PADDED},
        {**ONE_EACH, "moe_apply_probs_on_input": True},
        {**MOE, "add_bias_linear": True, "gated_linear_unit": False},
        {
            **MOE,
            "mtp_num_layers": 1,
            "moe_router_load_balancing_type": "none",
        },  # Megatron's log of that loss has no MTP layer
    ]:
        for expert in (1, 2) if model is MOE else (2,):
            same_training(Job(model=model, expert=expert, steps=3, seed=rank_info.seed), spec="local")


@ranks(world_size=2, megatron=True)
def test_experts_split_over_tensor_parallel_ranks_match_megatrons_linears(rank_info: RankInfo) -> None:
    """Expert tensor parallelism needs equal counts under gloo, which padding to capacity gives."""
    job = Job(model={**MOE, **PADDED}, tensor=2, sequence_parallel=True, steps=4, seed=rank_info.seed)
    same_training(job, turbo={"linear": "megatron"})
    same_training(job.but(model={**MOE, **PADDED, "gated_linear_unit": False}), turbo={"linear": "megatron"})


@ranks(world_size=4, megatron=True)
def test_tensor_and_expert_parallelism_together_match_megatrons_linears(rank_info: RankInfo) -> None:
    job = Job(model=SHARED, tensor=2, expert=2, sequence_parallel=True, steps=3, seed=rank_info.seed)
    same_training(job, turbo={"linear": "megatron"})
    same_training(job.but(tensor=1, expert=4, sequence_parallel=False), spec="local")


def _route_all_alike(models: list[Any]) -> None:
    """All tokens see the same two experts, those that a tie prefers, which are on one rank."""
    for name, parameter in models[0].named_parameters():
        if "router" in name:
            torch.nn.init.zeros_(parameter)
            parameter.requires_grad_(False)
    for name, module in models[0].named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args: _TOKENS.append(int(args[1].sum())))


_TOKENS: list[int] = []
"""That reached the experts of this rank, call by call."""


@ranks(world_size=2, megatron=True)
def test_a_rank_whose_experts_get_no_token_keeps_step_with_the_others(rank_info: RankInfo) -> None:
    """Its gradients are zeros, but they come: DDP and the other rank would wait for them for ever."""
    for fused in (False, True):
        for precision in ("bf16", "mxfp4"):
            model = {**MOE, **WIDE, "gradient_accumulation_fusion": fused, "moe_router_load_balancing_type": "none"}
            job = Job(model=model, turbo={"precision": precision}, expert=2, bf16=True, steps=2, seed=rank_info.seed)
            job = job.but(ddp={"overlap_grad_reduce": True}, on_model=_route_all_alike, optimizer={"clip_grad": 0.0})
            grouped = train(job.but(model={**model, **GROUPED}))
            assert grouped.losses == train(job).losses, (fused, precision)
    busy: list[Any] = [None, None]
    dist.all_gather_object(busy, any(_TOKENS))
    assert sorted(busy) == [False, True], "else it is not what this test is about"


@ranks(world_size=2, megatron=True)
def test_biases_of_experts_are_not_summed_over_tensor_parallel_ranks(rank_info: RankInfo) -> None:
    """Those ranks hold other experts. Megatron's own row-parallel experts mark the bias for such a sum under sequence
    parallelism, so the reference is a run without tensor parallelism.
    """
    model = {**MOE, "moe_router_load_balancing_type": "none", "add_bias_linear": True, "gated_linear_unit": False}
    job = Job(model=model, expert=2, steps=3, seed=rank_info.seed)
    alone = train(job.but(spec="local"))
    grouped = {**model, **GROUPED}
    split = train(job.but(model=grouped, tensor=2, sequence_parallel=True, micro_batches=4))
    assert relative_difference(_means(split.losses), _means(alone.losses)) <= LOSSES
    assert relative_difference(split.gradient_norms, alone.gradient_norms) <= GRADIENTS


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("precision", ["bf16", "mxfp4"])
def test_grouping_changes_no_bit_of_a_training(rank_info: RankInfo, precision: str) -> None:
    """With wgrad fused and DDP's transfers overlapped. No gradient clipping, whose norm sums in another order; recipes by
    module and the BF16 layers are the same ones.
    """
    turbo = {"precision": precision, "bf16_first_layers": 1, "modules": {"*.experts.linear_fc2": "mxfp8"}}
    fused = {"gradient_accumulation_fusion": True}
    job = Job(model={**MOE, **WIDE, **fused}, turbo=turbo, expert=2, bf16=True, steps=4, seed=rank_info.seed)
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    job = job.but(distributed_optimizer=True, ddp=overlapped, optimizer={"clip_grad": 0.0})
    assert train(job.but(model={**job.model, **GROUPED})).losses == train(job).losses


@ranks(world_size=2, megatron=True)
def test_recomputation_gives_the_same_bits(rank_info: RankInfo) -> None:
    pretend_transformer_engine()
    for precision in ("bf16", "mxfp4"):
        turbo = {"precision": {"preset": "mxfp4", "dy": {"rounding": "stochastic"}} if precision == "mxfp4" else "bf16"}
        job = Job(model={**MOE, **WIDE, **GROUPED}, turbo=turbo, expert=2, bf16=True, steps=2, seed=rank_info.seed)
        plain = train(job)
        for recompute in (FULL, selective("moe"), selective("moe_act")):
            again = train(job.but(model={**job.model, **recompute}))
            assert again.losses == plain.losses, (precision, recompute)
            assert again.gradient_norms == plain.gradient_norms, (precision, recompute)


@ranks(world_size=2, megatron=True)
def test_resuming_gives_the_same_bits(rank_info: RankInfo, tmp_path: Path) -> None:
    """With random bits in every backward, which the checkpoint's random states must bring back."""
    folder = str(tmp_path / "checkpoint")
    turbo = {"precision": {"preset": "mxfp4", "dy": {"rounding": "stochastic"}}}
    job = Job(model={**MOE, **GROUPED}, expert=2, bf16=True, turbo=turbo, seed=rank_info.seed)
    job = job.but(distributed_optimizer=True)
    train(job.but(steps=2, save=folder))
    whole = train(job.but(steps=4))
    resumed = train(job.but(steps=2, first_step=2, load=folder, seed=rank_info.seed + 1))
    assert resumed.losses == whole.losses[2:]
    assert resumed.gradient_norms == whole.gradient_norms[2:]
    for name, value in whole.parameters.items():
        assert torch.equal(resumed.parameters[name], value), name


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "not"])
def test_a_checkpoint_moves_between_grouped_and_single_experts_with_the_optimizer(
    rank_info: RankInfo, tmp_path: Path, distributed: bool
) -> None:
    """Six steps of Megatron's local spec against two of it, two with grouped experts, two of the local spec again."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    local = Job(spec="local", model=MOE, expert=2, distributed_optimizer=distributed, seed=rank_info.seed)
    grouped = {"spec": "turbo", "model": {**MOE, **GROUPED}}
    expected = train(local.but(steps=6)).losses
    losses = train(local.but(steps=2, save=first)).losses
    losses += train(local.but(steps=2, first_step=2, load=first, save=second, **grouped)).losses
    losses += train(local.but(steps=2, first_step=4, load=second, match_keys=True)).losses
    assert relative_difference(losses, expected) <= 1e-5


@ranks(world_size=2, megatron=True)
def test_experts_of_pipeline_stages_and_their_chunks_write_what_others_load(
    rank_info: RankInfo, tmp_path: Path
) -> None:
    """Dense layers in between, so that keys hold a layer's number: weights pass through stages, chunks of stages and experts on
    two ranks unchanged.
    """
    from megatron.core import dist_checkpointing

    model = {**MOE, "num_layers": 4, "moe_layer_freq": [0, 1, 1, 0], "use_cpu_initialization": False}
    grouped = {"spec": "turbo", "model": {**model, **GROUPED}}
    layouts: list[dict[str, Any]] = [
        {"spec": "local", "model": model, "expert": 2},
        {**grouped, "pipeline": 2},
        {**grouped, "pipeline": 2, "virtual": 2},
        {**grouped, "expert": 2},
    ]
    idle = {"steps": 1, "optimizer": {"lr": 0.0, "weight_decay": 0.0}, "optimizer_state": False}
    folders = [str(tmp_path / str(number)) for number in range(len(layouts))]
    for number, layout in enumerate(layouts):
        load = folders[number - 1] if number else None
        train(Job(seed=rank_info.seed + number, load=load, save=folders[number], **idle).but(**layout))
    expected = _experts(dist_checkpointing.load_plain_tensors(folders[0]))
    assert len(expected) == 4
    found = _experts(dist_checkpointing.load_plain_tensors(folders[-1]))
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@ranks(world_size=2, megatron=True)
def test_tokens_that_the_router_pads_to_whole_blocks(rank_info: RankInfo) -> None:
    """`moe_router_padding_for_quantization`, which Megatron takes with its own fp8 or fp4 only: set behind its back."""
    from megatron.core.transformer.moe import token_dispatcher

    counts: list[int] = []

    def pad(models: list[Any]) -> None:
        models[0].config.moe_router_padding_for_quantization = True
        for name, module in models[0].named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(lambda _, args: counts.extend(args[1].tolist()))

    model = {**MOE, **WIDE, "moe_router_load_balancing_type": "none"}
    job = Job(model=model, turbo={"precision": "mxfp4"}, expert=2, bf16=True, steps=2, seed=rank_info.seed)
    job = job.but(on_model=pad, optimizer={"clip_grad": 0.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "get_align_size_for_quantization", lambda config: 32)
        assert train(job.but(model={**model, **GROUPED})).losses == train(job).losses
    assert counts
    assert not any(count % 32 for count in counts)


@ranks(world_size=2, megatron=True)
def test_weights_go_through_every_layout_of_experts_unchanged(rank_info: RankInfo, tmp_path: Path) -> None:
    """Local experts, then grouped ones at other expert- and tensor-parallel sizes, and local ones again: each loads what the
    one before saved. All give the same loss, and in the end every checkpoint holds the same tensors.
    """
    from megatron.core import dist_checkpointing

    model = {
        **MOE,
        **PADDED,
        "moe_expert_capacity_factor": 2.0,
    }  # room for all tokens: gloo wants equal counts of all ranks
    model["use_cpu_initialization"] = False  # with it, all expert-parallel ranks draw the same experts
    single = {"spec": "local", "model": model}
    grouped = {"spec": "turbo", "model": {**model, **GROUPED}}
    layouts: list[dict[str, Any]] = [
        {**single, "expert": 2},
        {**grouped, "expert": 1},
        {**grouped, "tensor": 2, "sequence_parallel": True, "micro_batches": 4},
        {**grouped, "expert": 2},
        {**single, "spec": "turbo", "expert": 1},
        {**grouped, "tensor": 2, "sequence_parallel": True, "micro_batches": 4},
        {**single, "expert": 2, "match_keys": True},
    ]
    idle = {"steps": 1, "optimizer": {"lr": 0.0, "weight_decay": 0.0}, "optimizer_state": False}
    losses, folders = [], [str(tmp_path / str(number)) for number in range(len(layouts))]
    for number, layout in enumerate(layouts):
        load = folders[number - 1] if number else None
        job = Job(seed=rank_info.seed + number, load=load, save=folders[number], **idle)
        losses.append(_means(train(job.but(**layout)).losses))
        assert relative_difference(losses[-1], losses[0]) <= 1e-5, layout
    expected = _experts(dist_checkpointing.load_plain_tensors(folders[0]))
    assert len(expected) == 2
    for folder in folders[1:]:
        found = _experts(dist_checkpointing.load_plain_tensors(folder))
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (folder, name)


def _experts(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if ".experts." in name and "_extra_state" not in name}
