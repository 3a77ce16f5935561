"""Distributed checkpoints: between this package's spec and Megatron's, between layouts, and back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.test_models import MLA, MOE
from tests.megatron.tiny_gpt import (
    Job,
    _write_in_this_process,
    bare,
    build,
    make_config,
    relative_difference,
    start,
    train,
)
from tests.support.distributed import RankInfo, ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

DENSE: dict[str, Any] = {"qk_layernorm": True}
DENSE_MLA: dict[str, Any] = {**MLA, "qk_layernorm": True}
#: What Megatron's Transformer Engine spec writes (experts one by one, no grouped GEMM), besides `_extra_state`.
ENGINE_KEYS = {
    "dense": {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.self_attention.linear_qkv.weight",
        "decoder.layers.self_attention.linear_proj.weight",
        "decoder.layers.self_attention.q_layernorm.weight",
        "decoder.layers.self_attention.k_layernorm.weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.weight",
        "decoder.layers.mlp.linear_fc2.weight",
    },
    "moe": {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.self_attention.linear_qkv.weight",
        "decoder.layers.self_attention.linear_proj.weight",
        "decoder.layers.pre_mlp_layernorm.weight",
        "decoder.layers.mlp.router.weight",
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "decoder.layers.mlp.experts.experts.linear_fc2.weight",
    },
    "mla": {
        "decoder.layers.input_layernorm.weight",
        "decoder.layers.self_attention.linear_q_down_proj.weight",
        "decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight",
        "decoder.layers.self_attention.linear_q_up_proj.weight",
        "decoder.layers.self_attention.linear_kv_down_proj.weight",
        "decoder.layers.self_attention.linear_kv_up_proj.layer_norm_weight",
        "decoder.layers.self_attention.linear_kv_up_proj.weight",
        "decoder.layers.self_attention.linear_proj.weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.weight",
        "decoder.layers.mlp.linear_fc2.weight",
    },
}
MODELS = {"dense": DENSE, "moe": MOE, "mla": DENSE_MLA}
MIXED: dict[str, Any] = {**MOE, "moe_layer_freq": [0, 1]}
EVERYWHERE = {
    "decoder.final_layernorm.weight",
    "embedding.word_embeddings.weight",
    "output_layer.weight",
}


@ranks(world_size=1, megatron=True)
def test_keys_are_transformer_engines_whoever_provides_the_modules(rank_info: RankInfo) -> None:
    for kind, model in MODELS.items():
        for turbo in [{}, {"norm": "megatron"}, {"linear": "megatron"}]:
            job = Job(model=model, turbo=turbo)
            start(job)
            state = build(job, make_config(job))[0].sharded_state_dict()
            keys = {item.key for item in state.values() if hasattr(item, "key") and "_extra_state" not in item.key}
            assert keys == ENGINE_KEYS[kind] | EVERYWHERE, (kind, turbo)


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("kind", [*MODELS, "mixed"])
def test_local_to_turbo_to_local_and_across_tensor_parallel_sizes(
    rank_info: RankInfo, kind: str, tmp_path: Path
) -> None:
    """Six steps of the local spec, against two of it, two of turbo under TP=2 and SP, and two of local again."""
    model, seed = {**MODELS, "mixed": MIXED}[kind], rank_info.seed
    experts = kind in ("moe", "mixed")
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    local = Job(spec="local", model=model, steps=2, seed=seed, expert=2 if experts else 1)
    turbo: dict[str, Any] = {"spec": "turbo"}
    if not experts:  # Megatron's optimizer cannot load state of experts into another expert-parallel size
        turbo |= {"tensor": 2, "sequence_parallel": True, "micro_batches": 4}
    expected = train(local.but(steps=6)).losses
    losses = train(local.but(save=first)).losses
    losses += train(local.but(first_step=2, load=first, save=second, **turbo)).losses
    losses += train(local.but(first_step=4, load=second, match_keys=True)).losses
    assert relative_difference(_means(losses), _means(expected)) <= 1e-5


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "sequence_parallel": True}], ids=["dp2", "tp2_sp"])
@pytest.mark.parametrize(
    "turbo",
    [{}, {"precision": {"preset": "mxfp4", "dy": {"rounding": "stochastic"}}}],
    ids=["bf16", "mxfp4_stochastic"],
)
def test_resuming_gives_the_same_bits(
    rank_info: RankInfo, layout: dict[str, Any], turbo: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    job = Job(bf16=True, turbo=turbo, seed=rank_info.seed, distributed_optimizer=True, **layout)
    train(job.but(steps=3, save=folder))
    whole = train(job.but(steps=6))
    resumed = train(job.but(steps=3, first_step=3, load=folder, seed=rank_info.seed + 1))
    assert resumed.losses == whole.losses[3:]
    assert resumed.gradient_norms == whole.gradient_norms[3:]
    for name, value in whole.parameters.items():
        assert torch.equal(resumed.parameters[name], value), name


@ranks(world_size=1, megatron=True)
def test_plain_state_dict_of_the_local_spec_loads(rank_info: RankInfo) -> None:
    for kind, model in MODELS.items():
        job = Job(spec="local", model=model, steps=2, seed=rank_info.seed)
        local = train(job)
        values = sorted(float(value.sum()) for value in local.parameters.values())
        for turbo in [{}, {"norm": "megatron"}]:
            other = train(job.but(spec="turbo", turbo=turbo, steps=0, seed=rank_info.seed + 1))
            loaded = bare(other.models[0]).load_state_dict(bare(local.models[0]).state_dict(), strict=True)
            assert not loaded.missing_keys, (kind, turbo)
            assert not loaded.unexpected_keys, (kind, turbo)
            assert values == sorted(float(value.sum()) for value in other.parameters.values()), (kind, turbo)


@ranks(world_size=1, megatron=True)
def test_checkpoint_with_transformer_engines_extra_states_loads(rank_info: RankInfo, tmp_path: Path) -> None:
    """Its modules write an `_extra_state` for every norm and core attention too; there is nothing in them for BF16 or MX."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    folder = tmp_path / "engine"
    job = Job(steps=1, seed=rank_info.seed)
    written = train(job)
    state = bare(written.models[0]).sharded_state_dict()
    for layer in range(2):
        for module in ("self_attention.core_attention", "mlp.linear_fc1.norm"):
            key = f"decoder.layers.{layer}.{module}._extra_state"
            name = f"decoder.layers.{module}._extra_state"
            state[key] = ShardedObject(name, torch.zeros(4, dtype=torch.uint8), (2,), (layer,), replica_id=(0, 0, 0))
    _write_in_this_process()
    folder.mkdir()
    dist_checkpointing.save({"model": state}, str(folder))
    read = train(job.but(steps=0, seed=rank_info.seed + 1, load=str(folder), optimizer_state=False))
    for name, value in written.parameters.items():
        assert torch.equal(read.parameters[name], value), name


def _means(history: list[list[float]]) -> list[list[float]]:
    """[step][0]: the mean loss over micro batches and ranks."""
    means = torch.tensor([[sum(step) / len(step)] for step in history], dtype=torch.float64)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()
