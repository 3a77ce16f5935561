"""Every kind of GPT the spec covers trains, and gives the losses of Megatron's local spec where that one can.

One launch of processes trains many models: starting Megatron costs more than training them.
"""

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
ENGINE = {"transformer_impl": "transformer_engine"}  # what Megatron-LM's command line says by default
LOSSES = 1e-5
GRADIENTS = 1e-4


def same_training(job: Job, *, gradients: float = GRADIENTS, **reference: Any) -> None:
    """Trains `job`, and the same with Megatron's local spec without SP (or with the settings of `reference`): the losses
    agree, and the gradient norms, which Adam would hide.
    """
    reference = reference or {"spec": "local", "sequence_parallel": False}
    turbo, other = train(job), train(job.but(**reference))
    assert relative_difference(turbo.losses, other.losses) <= LOSSES, job
    assert relative_difference(turbo.gradient_norms, other.gradient_norms) <= gradients, job


VARIANTS: list[dict[str, Any]] = [
    {"qk_layernorm": True},
    {"qk_l2_norm": True},
    {"normalization": "LayerNorm", "add_bias_linear": True, "qk_layernorm": True},
    {"gated_linear_unit": False, "add_bias_linear": True, "add_qkv_bias": True},
    {"num_query_groups": None, "window_size": (4, 0)},
    {"num_query_groups": 1},
    {"layernorm_epsilon": 1e-3, "softmax_type": "learnable"},
    {"apply_query_key_layer_scaling": True, "attention_output_gate": True},
    ENGINE,
]


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("tensor", [1, 2])
def test_dense_variants_match_local(rank_info: RankInfo, tensor: int) -> None:
    """`num_query_groups: 1` with TP=2: fewer keys than ranks. `transformer_impl` must not matter to this spec."""
    for model in VARIANTS:
        same_training(Job(tensor=tensor, model=model, steps=4, seed=rank_info.seed))


@ranks(world_size=2, megatron=True)
def test_weights_drawn_on_the_device_equal_megatrons(rank_info: RankInfo) -> None:
    """`use_cpu_initialization=False`: the tensor-parallel tracker draws, so the order of the draws must be Megatron's."""
    job = Job(steps=2, seed=rank_info.seed)
    same_training(job.but(tensor=2, model={"use_cpu_initialization": False}))
    same_training(job.but(expert=2, model={"use_cpu_initialization": False, **MOE}))


MOE_MODELS = [
    {**MOE, **ENGINE},
    {**SHARED, "moe_layer_freq": [1, 0]},
    {**SHARED, "moe_layer_freq": 2, "moe_shared_expert_overlap": True},
]


@ranks(world_size=2, megatron=True)
def test_mixture_of_experts_with_expert_parallelism_matches_local(rank_info: RankInfo) -> None:
    """Experts in every layer; in one of two, with shared experts; by pattern and by frequency."""
    for model in MOE_MODELS:
        same_training(Job(model=model, expert=2, steps=4, seed=rank_info.seed))


@ranks(world_size=2, megatron=True)
def test_mixture_of_experts_with_sequence_parallelism_matches_megatrons_linears(rank_info: RankInfo) -> None:
    """Megatron's MoE under TP needs SP, which its local norm refuses: the reference has this package's norm."""
    megatrons = {"linear": "megatron", "attention": "megatron"}
    for model in MOE_MODELS:
        job = Job(model=model, tensor=2, sequence_parallel=True, steps=4, seed=rank_info.seed)
        same_training(job, turbo=megatrons)


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("tensor", [1, 2])
def test_multi_latent_attention_matches_local(rank_info: RankInfo, tensor: int) -> None:
    """The down projections are whole on every rank here and sharded in the local spec: the same numbers.

    Without SP, Megatron sums the gradient of MLA's `q_layernorm` over tensor-parallel ranks that all have the whole of it,
    with either spec. So that gradient is right only with SP, and norms of gradients are not compared across the two.
    """
    for variant in [{}, {"q_lora_rank": None}, {"qk_layernorm": True}, {"qk_layernorm": True, **ENGINE}]:
        job = Job(tensor=tensor, model={**MLA, **variant}, steps=4, seed=rank_info.seed)
        same_training(job)
        if tensor == 2:
            same_training(
                job.but(sequence_parallel=True),
                gradients=1e-2 if "qk_layernorm" in variant else GRADIENTS,
                spec="local",
                sequence_parallel=False,
            )


@ranks(world_size=2, megatron=True)
def test_uncompressed_queries_with_a_norm_on_the_latent_match_megatrons_linears(rank_info: RankInfo) -> None:
    """DeepSeek-V2-Lite's attention, which Megatron 0.19's local spec cannot build: the reference has its linears only."""
    model = {**MLA, "q_lora_rank": None, "qk_layernorm": True}
    job = Job(model=model, tensor=2, sequence_parallel=True, steps=4, seed=rank_info.seed)
    same_training(job, turbo={"linear": "megatron"})


@ranks(world_size=2, megatron=True)
def test_multi_token_prediction_matches_local(rank_info: RankInfo) -> None:
    model = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
    for layout in [{}, {"pipeline": 2}, {"tensor": 2}]:
        same_training(Job(model=model, steps=4, seed=rank_info.seed, **layout))
    last_is_moe = {**model, **MOE, "moe_layer_freq": [0, 1]}  # an MTP layer is like the decoder's last
    same_training(Job(model=last_is_moe, expert=2, steps=4, seed=rank_info.seed))


@ranks(world_size=2, megatron=True)
def test_pipeline_splits_match_local(rank_info: RankInfo) -> None:
    """Virtual stages, uneven ones, and an explicit layout."""
    same_training(Job(pipeline=2, virtual=2, model={"num_layers": 4}, steps=4, seed=rank_info.seed))
    for model in [
        {"num_layers": 3, "num_layers_in_first_pipeline_stage": 1},
        {"num_layers": 3, "account_for_loss_in_pipeline_split": True},
        {"num_layers": 3, "pipeline_model_parallel_layout": "Et|ttL"},
    ]:
        same_training(Job(pipeline=2, model=model, steps=4, seed=rank_info.seed))


@ranks(world_size=2, megatron=True)
def test_hybrid_model_of_attention_and_mlp_layers_matches_a_gpt(rank_info: RankInfo) -> None:
    """Megatron's own hybrid spec needs Transformer Engine; but attention and MLP layers in turn are a GPT's layers."""
    init = {"output_layer_init_method": _normal}  # its scale depends on the number of layers
    for layout in [{}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}]:
        job = Job(steps=4, seed=rank_info.seed, **layout)
        gpt = train(job.but(model={"num_layers": 2, **init}, spec="local", sequence_parallel=False))
        for norm in ["turbo"] if job.sequence_parallel else ["turbo", "megatron"]:
            hybrid = train(job.but(model={"num_layers": 4, **init}, hybrid="*-*-", turbo={"norm": norm}))
            assert relative_difference(hybrid.losses, gpt.losses) <= LOSSES, (layout, norm)
            assert relative_difference(hybrid.gradient_norms, gpt.gradient_norms) <= GRADIENTS, (layout, norm)


def _normal(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(weight, std=0.02)
