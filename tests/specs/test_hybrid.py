"""The stack of a hybrid model."""

from __future__ import annotations

import pytest

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.modules import TurboGroupedMLP
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.specs.hybrid import hybrid_stack_spec
from tests.megatron.tiny_gpt import Job, build, make_config, start
from tests.specs.configs import MOE, config
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron


@ranks(world_size=1, megatron=True)
def test_layers_of_every_kind_get_plans_of_their_own_number(rank_info: RankInfo) -> None:
    turbo = {"precision": "mxfp8", "bf16_last_layers": 1, "modules": {"decoder.layers.1.*": "mxfp4"}}
    model = {"num_layers": 4, **{name: value for name, value in MOE.items() if "hidden" not in name}}
    job = Job(
        hybrid="*-E-", model={**model, "moe_ffn_hidden_size": 32, "moe_token_dispatcher_type": "alltoall"}, turbo=turbo
    )
    start(job)
    layers = build(job, make_config(job))[0].decoder.layers
    assert layers[0].self_attention.linear_qkv.plan.recipe == "mxfp8"
    assert layers[1].mlp.linear_fc1.plan.recipe == "mxfp4"
    assert layers[2].mlp.experts.local_experts[0].linear_fc1.plan.path == "decoder.layers.2.mlp.experts.linear_fc1"
    assert layers[3].mlp.linear_fc2.plan.recipe == "bf16"


@ranks(world_size=1, megatron=True)
def test_experts_of_a_hybrid_model_are_grouped_too(rank_info: RankInfo) -> None:
    model = {"num_layers": 2, **{name: value for name, value in MOE.items() if "hidden" not in name}}
    model |= {"moe_ffn_hidden_size": 32, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    job = Job(hybrid="*E", model=model, turbo={"precision": "mxfp8", "bf16_last_layers": 1})
    start(job)
    experts = build(job, make_config(job))[0].decoder.layers[1].mlp.experts
    assert isinstance(experts, TurboGroupedMLP)
    assert experts.linear_fc2.plan.path == "decoder.layers.1.mlp.experts.linear_fc2"
    assert experts.linear_fc2.plan.recipe == "bf16"


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("kind", ["G", "D", "+"])
def test_kind_of_layer_without_a_spec_is_refused(rank_info: RankInfo, kind: str) -> None:
    """A slot left alone is an identity: the model would train without those layers."""
    job = Job(hybrid="---" + kind, model={"num_layers": 4})
    start(job)
    if not _pattern_may_hold(kind):
        pytest.skip("this release has no such kind of layer")
    with pytest.raises(UnsupportedError, match=r"decoder\.layers\.3: the layer pattern asks for"):
        build(job, make_config(job))


def _pattern_may_hold(kind: str) -> bool:
    submodules = compat.hybrid_classes()[1]
    slots = {"G": "gdn_layer", "D": "dsa_layer", "+": "mla_layer"}
    return slots[kind] in submodules.__dataclass_fields__


@ranks(world_size=1, megatron=True)
def test_mamba_layer_reaches_megatrons_mixer(rank_info: RankInfo) -> None:
    """The mixer's own requirement is what fails on a machine without it, not the spec."""
    job = Job(hybrid="*-*M", model={"num_layers": 4, "mamba_num_heads": None})
    start(job)
    with pytest.raises(ImportError, match=r"(?i)mamba|triton|einops"):
        build(job, make_config(job))


def test_mtp_in_a_hybrid_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"mtp_num_layers: MTP in a hybrid model"):
        hybrid_stack_spec(config(mtp_num_layers=1))


@pytest.mark.parametrize("pattern", ["decoder.layers.4.*", "*.linear_fc3"])
def test_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(ConfigError, match="matches no linear"):
        hybrid_stack_spec(config(), TurboConfig.from_dict({"modules": {pattern: "mxfp4"}}))


def test_pattern_may_name_a_mixers_projection() -> None:
    hybrid_stack_spec(config(), TurboConfig.from_dict({"modules": {"*.mixer.in_proj": "mxfp4"}}))
