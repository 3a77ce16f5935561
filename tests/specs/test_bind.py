"""Each module gets the plan of its own path."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.modules import TurboColumnParallelLinear, TurboLinear, TurboNorm, TurboRowParallelLinear
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.specs.bind import DownProjection, bind, modules_of
from primus_turbo_plugin.specs.gpt import GptSpecs, gpt_layer_spec, gpt_module_paths
from tests.megatron.test_models import MLA as TINY_MLA
from tests.megatron.test_models import SHARED
from tests.megatron.tiny_gpt import Job, build, make_config, start
from tests.specs.configs import MLA, MOE, config
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron


def plan_of(path: str) -> ModulePlan:
    return ModulePlan(path=path)


def test_walk_reaches_classes_specs_partials_and_dataclasses() -> None:
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    fc1 = ModuleSpec(module=TurboColumnParallelLinear, params={"stride": 2})
    mlp = functools.partial(
        print, 1, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=TurboRowParallelLinear), other=3
    )
    bound = bind(mlp, "decoder.layers.5.mlp", plan_of)
    assert bound.func is print
    assert bound.args == (1,)
    assert bound.keywords["other"] == 3
    slots = bound.keywords["submodules"]
    assert slots.linear_fc1.params == {"stride": 2, "plan": plan_of("decoder.layers.5.mlp.linear_fc1")}
    assert slots.linear_fc2.params == {"plan": plan_of("decoder.layers.5.mlp.linear_fc2")}
    assert fc1.params == {"stride": 2}, "the template must stay unbound: another layer is made from it"


@pytest.mark.parametrize("spec", [None, int, 7, "name", functools.partial(print)])
def test_what_is_not_ours_passes_through(spec: Any) -> None:
    assert bind(spec, "somewhere", plan_of) is spec


def test_down_projection_passes_for_a_class_that_mla_knows() -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    bound = bind(TurboLinear, "decoder.layers.0.self_attention.linear_q_down_proj", plan_of)
    assert isinstance(bound, DownProjection)
    assert bound in [None, ColumnParallelLinear]
    assert bound not in [None, RowParallelLinear]
    assert not isinstance(bind(TurboLinear, "decoder.layers.0.elsewhere", plan_of), DownProjection)


def test_paths_of_a_dense_layer() -> None:
    assert gpt_module_paths(config(num_layers=1, qk_layernorm=True)) == [
        f"decoder.layers.0.{name}"
        for name in [
            "self_attention.linear_qkv",
            "self_attention.core_attention",
            "self_attention.linear_proj",
            "self_attention.q_layernorm",
            "self_attention.k_layernorm",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        ]
    ] + ["decoder.final_layernorm"]


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_share_a_path_and_shared_experts_have_their_own(grouped: bool) -> None:
    """The same paths whether experts are grouped: a recipe by module means the same."""
    paths = gpt_module_paths(config(num_layers=1, **MOE, moe_grouped_gemm=grouped))
    assert [path for path in paths if ".mlp." in path] == [
        f"decoder.layers.0.mlp.{name}"
        for name in [
            "experts.linear_fc1",
            "experts.linear_fc2",
            "shared_experts.linear_fc1",
            "shared_experts.linear_fc2",
        ]
    ]


def test_mtp_is_named_alike_in_every_release() -> None:
    paths = gpt_module_paths(config(num_layers=1, mtp_num_layers=2))
    inner = "transformer_layer.self_attention.linear_qkv"
    assert {f"mtp.layers.{i}.{name}" for i in (0, 1) for name in (inner, "eh_proj", "final_layernorm", "enorm")} <= set(
        paths
    )


def test_mla_has_only_the_query_projections_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.transformer.multi_latent_attention.HAVE_TE", False)
    with_lora = gpt_module_paths(config(num_layers=1, **MLA))
    without = gpt_module_paths(config(num_layers=1, **{**MLA, "q_lora_rank": None}))
    assert [path.rpartition(".")[2] for path in with_lora if "_q_" in path] == [
        "linear_q_down_proj",
        "linear_q_up_proj",
    ]
    assert [path.rpartition(".")[2] for path in without if "_q_" in path] == ["linear_q_proj"]


@pytest.mark.parametrize("q_lora_rank", [32, None])
def test_latents_have_norms_and_uncompressed_queries_none(
    q_lora_rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.transformer.multi_latent_attention.HAVE_TE", False)
    paths = gpt_module_paths(config(num_layers=1, **{**MLA, "q_lora_rank": q_lora_rank, "qk_layernorm": True}))
    norms = {path.rpartition(".")[2] for path in paths if ".self_attention." in path and "norm" in path}
    assert norms == ({"q_layernorm", "kv_layernorm"} if q_lora_rank else {"kv_layernorm"})


def test_layers_get_plans_of_their_own_number() -> None:
    turbo = TurboConfig.from_dict({"precision": "mxfp4", "bf16_first_layers": 1, "modules": {"*.2.mlp.*": "mxfp8"}})
    plans = {plan.path: plan for plan in GptSpecs(config(), turbo, None).linear_plans()}
    assert plans["decoder.layers.0.mlp.linear_fc1"].recipe == "bf16"
    assert plans["decoder.layers.1.mlp.linear_fc1"].recipe == "mxfp4"
    assert plans["decoder.layers.2.mlp.linear_fc1"].recipe == "mxfp8"
    assert plans["decoder.layers.2.self_attention.linear_qkv"].recipe == "mxfp4"
    assert len(plans) == 16


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ("decoder.layers.9.*", "bf16"),
        ("*.linear_fc3", "mxfp8"),
        ("*.core_attention", "mxfp4"),
        ("*layernorm", {"padding": "refuse"}),
    ],
)
def test_pattern_that_matches_no_module_it_could_act_on_is_an_error(pattern: str, value: Any) -> None:
    """A precision given to attention or to a norm would be ignored."""
    turbo = TurboConfig.from_dict({"modules": {pattern: value}})
    with pytest.raises(ConfigError, match=r"matches no linear.*decoder\.layers\.0\.self_attention\.linear_qkv"):
        gpt_layer_spec(config(), turbo, pp_rank=0)


def test_pattern_may_give_kernels_to_any_module() -> None:
    turbo = TurboConfig.from_dict({"modules": {"*.core_attention": {"kernels": ["reference"]}}})
    layer = gpt_layer_spec(config(), turbo, pp_rank=0).layer_specs[0]
    attention = layer.submodules.self_attention.submodules.core_attention
    assert attention.params["plan"].kernels["attention"] == ("reference",)


def test_pattern_for_a_component_of_another_provider_is_an_error() -> None:
    turbo = TurboConfig.from_dict({"linear": "megatron", "modules": {"*.linear_fc1": {"kernels": ["reference"]}}})
    with pytest.raises(ConfigError, match="matches no module"):
        gpt_layer_spec(config(), turbo, pp_rank=0)


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize(
    "model",
    [
        {},
        {**SHARED, "moe_layer_freq": [0, 1]},
        {**SHARED, "moe_layer_freq": [0, 1], "moe_grouped_gemm": True},
        TINY_MLA | {"qk_layernorm": True},
        {"mtp_num_layers": 2},
    ],
    ids=["dense", "moe", "grouped moe", "mla", "mtp"],
)
def test_every_module_of_a_built_model_has_the_plan_of_its_path(rank_info: RankInfo, model: dict[str, Any]) -> None:
    """A module left without a plan would silently run in BF16."""
    from primus_turbo_plugin.specs.provider import TURBO_CLASSES

    job = Job(model=model, turbo={"precision": "mxfp8"})
    start(job)
    found = {}
    for name, module in build(job, make_config(job))[0].named_modules():
        if isinstance(module, TURBO_CLASSES):
            path = name.replace("mtp_model_layer", "transformer_layer")
            path = ".".join(part for part in path.split(".") if part != "local_experts")
            path = path.replace("experts.0.", "experts.").replace("experts.1.", "experts.")
            path = path.replace("experts.2.", "experts.").replace("experts.3.", "experts.")
            assert module.plan.path == path
            assert module.plan.recipe == "mxfp8"
            found[path] = type(module)
    from primus_turbo_plugin.specs.gpt import gpt_module_paths as all_paths

    assert set(found) == set(all_paths(make_config(job)))


def test_modules_of_lists_classes() -> None:
    assert modules_of(TurboNorm, "decoder.final_layernorm") == {"decoder.final_layernorm": TurboNorm}
