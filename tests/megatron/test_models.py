"""Every kind of GPT the spec covers trains, and gives the losses of Megatron's local spec where that one can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.megatron.tiny_gpt import Job, relative_difference, train
from tests.support.distributed import RankInfo, ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
SHARED = {**MOE, "moe_shared_expert_intermediate_size": 48}
MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}
FP32 = 1e-5
GRADIENTS = 1e-4


def same_training(job: Job, **reference: Any) -> None:
    """Trains `job`, and the same with Megatron's local spec without SP (or with the settings of `reference`): the losses
    agree, and the gradient norms, which Adam would hide.
    """
    reference = reference or {"spec": "local", "sequence_parallel": False}
    turbo, other = train(job), train(job.but(**reference))
    assert relative_difference(turbo.losses, other.losses) <= FP32
    assert relative_difference(turbo.gradient_norms, other.gradient_norms) <= GRADIENTS


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    "model",
    [
        {"qk_layernorm": True},
        {"normalization": "LayerNorm", "add_bias_linear": True, "qk_layernorm": True},
        {"gated_linear_unit": False, "add_bias_linear": True, "add_qkv_bias": True},
        {"num_query_groups": None, "window_size": (4, 0)},
        {"layernorm_epsilon": 1e-3},
    ],
    ids=["qk_norm", "layer_norm_bias", "gelu_free_mlp_bias", "window", "epsilon"],
)
def test_dense_variant_matches_local(rank_info: RankInfo, tensor: int, model: dict[str, Any]) -> None:
    same_training(Job(tensor=tensor, model=model, steps=6, seed=rank_info.seed))


@ranks(world_size=2, megatron=True)
def test_weights_drawn_on_the_device_equal_megatrons(rank_info: RankInfo) -> None:
    """`use_cpu_initialization=False`: the tensor-parallel tracker draws, so the order of the draws must be Megatron's."""
    model = {"use_cpu_initialization": False}
    job = Job(tensor=2, model=model, steps=3, seed=rank_info.seed)
    same_training(job)
    same_training(job.but(model={**model, **MOE}, tensor=1, expert=2))


MOE_MODELS = [MOE, {**SHARED, "moe_layer_freq": [1, 0]}, {**SHARED, "moe_layer_freq": 2, "add_bias_linear": False}]


@ranks(world_size=2, megatron=True)
def test_mixture_of_experts_with_expert_parallelism_matches_local(rank_info: RankInfo) -> None:
    """Experts in every layer; in one of two, with shared experts; by pattern and by frequency."""
    for model in MOE_MODELS:
        same_training(Job(model=model, expert=2, steps=6, seed=rank_info.seed))


@ranks(world_size=2, megatron=True)
def test_mixture_of_experts_with_sequence_parallelism_matches_megatrons_linears(rank_info: RankInfo) -> None:
    """Megatron's MoE under TP needs SP, which its local norm refuses: the reference has this package's norm."""
    megatrons = {"linear": "megatron", "attention": "megatron"}
    for model in MOE_MODELS:
        job = Job(model=model, tensor=2, sequence_parallel=True, steps=6, seed=rank_info.seed)
        same_training(job, turbo=megatrons)


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    "variant", [{}, {"q_lora_rank": None}, {"qk_layernorm": True}], ids=["lora", "no_q_lora", "norms"]
)
def test_multi_latent_attention_matches_local(rank_info: RankInfo, tensor: int, variant: dict[str, Any]) -> None:
    """The down projections are whole on every rank here and sharded in the local spec: the same numbers."""
    model = {**MLA, **variant}
    for sequence_parallel in [False, True] if tensor == 2 else [False]:
        same_training(
            Job(tensor=tensor, sequence_parallel=sequence_parallel, model=model, steps=6, seed=rank_info.seed)
        )


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}, {"tensor": 2}], ids=["dp2", "pp2", "tp2"])
def test_multi_token_prediction_matches_local(rank_info: RankInfo, layout: dict[str, Any]) -> None:
    same_training(
        Job(model={"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}, steps=6, seed=rank_info.seed, **layout)
    )


@ranks(world_size=2, megatron=True)
def test_virtual_pipeline_matches_local(rank_info: RankInfo) -> None:
    same_training(Job(pipeline=2, virtual=2, model={"num_layers": 4}, steps=6, seed=rank_info.seed))


@ranks(world_size=2, megatron=True)
def test_uneven_pipeline_stages_match_local(rank_info: RankInfo) -> None:
    for model in [
        {"num_layers": 3, "num_layers_in_first_pipeline_stage": 1},
        {"num_layers": 3, "account_for_loss_in_pipeline_split": True},
        {"num_layers": 3, "pipeline_model_parallel_layout": "Et|ttL"},
    ]:
        same_training(Job(pipeline=2, model=model, steps=4, seed=rank_info.seed))


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}], ids=["dp2", "tp2_sp", "pp2"]
)
@pytest.mark.parametrize("norm", ["turbo", "megatron"])
def test_hybrid_model_of_attention_and_mlp_layers_matches_a_gpt(
    rank_info: RankInfo, layout: dict[str, Any], norm: str
) -> None:
    """Megatron's own hybrid spec needs Transformer Engine; but attention and MLP layers in turn are a GPT's layers."""
    if norm == "megatron" and layout.get("sequence_parallel"):
        pytest.skip("Megatron's norm refuses sequence parallelism")
    job = Job(steps=4, seed=rank_info.seed, **layout)
    init = {"output_layer_init_method": _normal}  # its scale depends on the number of layers
    hybrid = train(job.but(model={"num_layers": 4, **init}, hybrid="*-*-", turbo={"norm": norm}))
    gpt = train(job.but(model={"num_layers": 2, **init}, spec="local", sequence_parallel=False))
    assert relative_difference(hybrid.losses, gpt.losses) <= FP32
    assert relative_difference(hybrid.gradient_norms, gpt.gradient_norms) <= GRADIENTS


def _normal(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(weight, std=0.02)
