"""Recomputing activations changes nothing: not the losses, not the random numbers, not which modules are quantised."""

from __future__ import annotations

import contextlib
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from tests.megatron.test_models import MLA, MOE
from tests.megatron.test_precision import WIDE
from tests.megatron.tiny_gpt import Job, train
from tests.support.distributed import RankInfo, ranks

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STOCHASTIC = {
    "precision": {"preset": "mxfp4", "dy": {"rounding": "stochastic"}, "fprop": {"x": {"rounding": "stochastic"}}}
}


def pretend_transformer_engine() -> None:
    """Megatron discards and recomputes outputs with functions of Transformer Engine, fp8 or not: give it idle ones."""
    from megatron.core.tensor_parallel import random

    from primus_turbo_plugin.specs import compat

    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
    random.fp8_autocast = lambda **_: contextlib.nullcontext()
    compat.transformer_engine_is_installed = lambda: True


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


#: Megatron compiles a small extension the first time a module is recomputed without its output being kept.
needs_compiler = pytest.mark.skipif(
    shutil.which("ninja") is None or shutil.which("g++") is None,
    reason="Megatron's recompute compiles with g++ and ninja",
)


@needs_compiler
@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("turbo", [{}, STOCHASTIC], ids=["bf16", "mxfp4_stochastic"])
@pytest.mark.parametrize("layout", [{"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}], ids=["tp2_sp", "pp2"])
def test_recomputation_gives_the_same_bits(rank_info: RankInfo, layout: dict[str, Any], turbo: dict[str, Any]) -> None:
    """With dropout and stochastic rounding: the second forward pass must draw what the first drew."""
    pretend_transformer_engine()
    model = {**WIDE, "num_layers": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    job = Job(model=model, turbo=turbo, steps=3, seed=rank_info.seed, **layout)
    plain = train(job)
    for recompute in [FULL, selective("core_attn"), selective("core_attn", "mlp"), selective("layernorm", "mlp")]:
        again = train(job.but(model={**model, **recompute}))
        assert again.losses == plain.losses, recompute
        assert again.gradient_norms == plain.gradient_norms, recompute


@needs_compiler
@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        (MOE, selective("moe")),
        (MOE, selective("layernorm")),
        ({**MOE, "moe_shared_expert_intermediate_size": 48}, selective("shared_experts")),
        (MLA, selective("mla_up_proj", "layernorm")),
        ({"mtp_num_layers": 1}, FULL),
    ],
    ids=["moe", "moe_norm", "shared_experts", "mla", "mtp"],
)
def test_every_selective_module_gives_the_same_bits(
    rank_info: RankInfo, model: dict[str, Any], recompute: dict[str, Any]
) -> None:
    pretend_transformer_engine()
    job = Job(model=model, turbo={"precision": "mxfp8"}, steps=3, seed=rank_info.seed)
    plain, again = train(job), train(job.but(model={**model, **recompute}))
    assert again.losses == plain.losses
    assert again.gradient_norms == plain.gradient_norms


@ranks(world_size=1, megatron=True)
def test_norms_that_are_to_be_recomputed_stand_alone(rank_info: RankInfo) -> None:
    """Megatron recomputes only a norm that is a module of its own; fused into the linear, the setting would do nothing."""
    from primus_turbo_plugin.modules import TurboColumnParallelLinear, TurboNorm

    pretend_transformer_engine()
    for model in [selective("layernorm"), {"fused_residual_rmsnorm": True}]:
        if "fused_residual_rmsnorm" in model and not _has_fused_residual():
            continue
        layer = train(Job(model=model, steps=1)).models[0].module.decoder.layers[0]
        assert isinstance(layer.input_layernorm, TurboNorm)
        assert isinstance(layer.pre_mlp_layernorm, TurboNorm)
        assert type(layer.self_attention.linear_qkv) is TurboColumnParallelLinear
        assert getattr(layer.input_layernorm, "returns_residual", False) == ("fused_residual_rmsnorm" in model)


def _has_fused_residual() -> bool:
    import dataclasses

    from megatron.core.transformer.transformer_config import TransformerConfig

    return any(field.name == "fused_residual_rmsnorm" for field in dataclasses.fields(TransformerConfig))
