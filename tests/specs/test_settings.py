"""Megatron's own settings are translated, honoured or refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.precision.communication import Communication
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.recipe import Recipe
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.specs.gpt import gpt_layer_spec
from primus_turbo_plugin.specs.report import honoured_settings
from primus_turbo_plugin.specs.settings import megatron_recipe, resolve
from primus_turbo_plugin.specs.settings_table import CONDITIONAL, HONOURED, REFUSED, known_fields
from primus_turbo_plugin.specs.untouched_fields import UNTOUCHED
from tests.specs.configs import MLA, MOE, config
from tests.specs.settings_document import DOCUMENT, rewritten

pytestmark = pytest.mark.megatron


def fields() -> dict[str, dataclasses.Field[Any]]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return {field.name: field for field in dataclasses.fields(MLATransformerConfig)}


def with_settings(**settings: Any) -> Any:
    """A configuration changed behind Megatron's own checks, which without Transformer Engine refuse some combinations."""
    cfg = config()
    for name, value in settings.items():
        setattr(cfg, name, value)
    return cfg


def test_every_field_of_the_installed_megatron_has_been_decided() -> None:
    """A new release's new field fails here until somebody decides what becomes of it."""
    assert set(fields()) <= known_fields()


def test_no_field_has_two_treatments() -> None:
    lists = [list(REFUSED), list(CONDITIONAL), list(HONOURED), [name for names in UNTOUCHED.values() for name in names]]
    every = [name for names in lists for name in names]
    assert len(every) == len(set(every))


def test_the_documentation_lists_every_field_as_decided() -> None:
    """Repair it with `python -m tests.specs.settings_document`."""
    assert DOCUMENT.read_text() == rewritten()
    assert known_fields() <= set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_setting_is_named_with_reason_and_remedy(name: str) -> None:
    if name not in fields():
        pytest.skip("this release has no such setting")
    rule = REFUSED[name]
    cfg = with_settings(**{name: 2 if 1 in rule.harmless else True})
    with pytest.raises(UnsupportedError) as refusal:
        gpt_layer_spec(cfg, _provided(rule, "refused"), pp_rank=0)
    assert name in refusal.value.reasons
    assert rule.why in str(refusal.value)
    assert rule.remedy[1:] in str(refusal.value)


@pytest.mark.parametrize("name", [name for name, rule in REFUSED.items() if rule.component])
def test_setting_is_left_to_a_provider_that_honours_it(name: str) -> None:
    if name not in fields():
        pytest.skip("this release has no such setting")
    rule = REFUSED[name]
    cfg = with_settings(**{name: 2 if 1 in rule.harmless else True})
    assert resolve(cfg, _provided(rule, "honoured")) is not None


def _provided(rule: Any, what: str) -> TurboConfig:
    if not rule.component:
        return TurboConfig()
    providers = {"turbo", "megatron", "transformer_engine"}
    chosen = sorted(rule.unless if what == "honoured" else providers - set(rule.unless))[-1]
    return TurboConfig(**{rule.component: chosen})


@pytest.mark.parametrize("name", REFUSED)
def test_harmless_values_are_accepted(name: str) -> None:
    for value in REFUSED[name].harmless:
        resolve(with_settings(**{name: value}))


def test_all_refusals_come_at_once() -> None:
    with pytest.raises(UnsupportedError) as refusal:
        resolve(with_settings(fp8_param=True, qk_clip=True, fp8="e4m3", fp8_recipe="delayed"))
    assert set(refusal.value.reasons) == {"fp8_param", "qk_clip", "fp8_recipe"}


RECIPES = [
    ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, Recipe.preset("fp8_tensorwise")),
    ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, Recipe.preset("fp8_tensorwise", dy={"element": "e5m2"})),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, Recipe.preset("mxfp8")),
    ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, Recipe.preset("mxfp8_hybrid")),
    ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, Recipe.preset("fp8_block128")),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_wgrad": False}, Recipe.preset("mxfp8", wgrad={"format": "bf16"})),
    ({"fp4": "e2m1", "fp4_recipe": "mxfp4"}, Recipe.preset("mxfp4")),
]


@pytest.mark.parametrize(("flags", "recipe"), RECIPES)
def test_megatrons_precision_becomes_a_recipe(flags: dict[str, Any], recipe: Recipe) -> None:
    resolved = resolve(with_settings(**flags))
    assert resolved.precision.linear() == recipe.linear()


def test_megatrons_enum_and_text_mean_the_same() -> None:
    from megatron.core.enums import Fp8Recipe

    as_enum = resolve(with_settings(fp8="e4m3", fp8_recipe=Fp8Recipe.mxfp8))
    assert as_enum == resolve(with_settings(fp8="e4m3", fp8_recipe="mxfp8"))


def test_every_recipe_of_megatrons_command_line_is_translated_or_refused() -> None:
    from megatron.core.enums import Fp8Recipe

    for fmt, recipe in itertools.product(["e4m3", "hybrid"], Fp8Recipe):
        cfg = with_settings(fp8=fmt, fp8_recipe=recipe)
        if recipe.value in ("delayed", "custom"):
            with pytest.raises(UnsupportedError, match=rf"fp8_recipe: '{recipe.value}'.*tensorwise, mxfp8, blockwise"):
                resolve(cfg)
        else:
            assert resolve(cfg).precision.linear().is_quantized


@pytest.mark.parametrize("recipe", ["nvfp4", "custom"])
def test_other_fp4_recipes_are_refused(recipe: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"fp4_recipe: '{recipe}' is not mxfp4"):
        resolve(with_settings(fp4="e2m1", fp4_recipe=recipe))


def test_precision_that_megatrons_linears_would_ignore_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"fp8: Megatron's own linears ignore it"):
        resolve(with_settings(fp8="e4m3", fp8_recipe="mxfp8"), TurboConfig(linear="megatron"))


def test_precision_is_left_to_transformer_engine_with_its_linears() -> None:
    turbo = TurboConfig(linear="transformer_engine")
    assert resolve(with_settings(fp8="e4m3", fp8_recipe="delayed", fp8_margin=2), turbo) == turbo


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8_margin", 1),
        ("fp8_interval", 2),
        ("fp8_amax_history_len", 16),
        ("fp8_amax_compute_algo", "max"),
        ("tp_only_amax_red", True),
    ],
)
def test_setting_of_delayed_scaling_is_refused_beside_another_recipe(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"{name}: .*delayed scaling"):
        resolve(with_settings(fp8="e4m3", fp8_recipe="mxfp8", **{name: value}))


def test_contradicting_precisions_name_both() -> None:
    with pytest.raises(
        ConfigError, match=r"fp8: 'e4m3', fp8_recipe: 'mxfp8' \(Megatron\).*precision: mxfp4 \(TurboConfig\)"
    ):
        resolve(with_settings(fp8="e4m3", fp8_recipe="mxfp8"), TurboConfig.from_dict({"precision": "mxfp4"}))


def test_agreeing_precisions_are_fine() -> None:
    turbo = TurboConfig.from_dict({"precision": "mxfp8"})
    assert resolve(with_settings(fp8="e4m3", fp8_recipe="mxfp8"), turbo).precision.linear() == turbo.precision.linear()


def test_first_and_last_layers_in_bf16() -> None:
    cfg = with_settings(
        fp8="e4m3",
        fp8_recipe="mxfp8",
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=2,
    )
    resolved = resolve(cfg)
    assert (resolved.bf16_first_layers, resolved.bf16_last_layers) == (1, 2)
    assert [resolved.plan(f"decoder.layers.{i}.mlp.linear_fc1", i, 4).recipe for i in range(4)] == [
        "bf16",
        "mxfp8",
        "bf16",
        "bf16",
    ]
    with pytest.raises(ConfigError, match=r"first_last_layers_bf16 \(Megatron\).*bf16_first_layers: 2"):
        resolve(cfg, TurboConfig(bf16_first_layers=2))


def test_first_and_last_layers_count_for_a_recipe_of_turbo_as_well() -> None:
    cfg = with_settings(first_last_layers_bf16=True)
    assert resolve(cfg, TurboConfig.from_dict({"precision": "mxfp4"})).bf16_first_layers == 1


@pytest.mark.parametrize(
    ("recompute", "refused"),
    [
        ({"recompute_granularity": "full"}, True),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}, True),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, False),
        ({}, False),
    ],
)
def test_recomputation_under_megatrons_fp8_is_refused_where_it_goes_through_transformer_engine(
    recompute: dict[str, Any], refused: bool
) -> None:
    cfg = with_settings(fp8="e4m3", fp8_recipe="mxfp8", **recompute)
    if refused:
        with pytest.raises(UnsupportedError, match=r"recompute_granularity: with fp8 set"):
            resolve(cfg)
    else:
        resolve(cfg)
    resolve(with_settings(**recompute), TurboConfig.from_dict({"precision": "mxfp8"}))


@pytest.mark.parametrize("module", ["layernorm", "mla_up_proj"])
def test_recomputation_by_discarding_outputs_needs_transformer_engine(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = with_settings(recompute_granularity="selective", recompute_modules=["core_attn", module])
    with pytest.raises(UnsupportedError, match=rf"recompute_modules: Megatron recomputes {module} with functions of"):
        resolve(cfg)
    monkeypatch.setattr(compat, "transformer_engine_is_installed", lambda: True)
    resolve(cfg)


def test_activation_of_grouped_experts_is_recomputed_without_transformer_engine() -> None:
    """This package does it itself, in its own experts only."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    resolve(with_settings(moe_grouped_gemm=True, **recompute))
    for settings, turbo in [({}, {}), ({"moe_grouped_gemm": True}, {"linear": "megatron"})]:
        with pytest.raises(UnsupportedError) as refusal:
            resolve(with_settings(**settings, **recompute), TurboConfig.from_dict(turbo))
        assert "moe_act" in refusal.value.reasons["recompute_modules"]


@pytest.mark.parametrize(
    ("argument", "value", "why"),
    [("optimizer", "muon", "one matrix a parameter"), ("moe_use_upcycling", True, "SequentialMLP's experts")],
)
def test_grouped_experts_are_refused_to_who_would_mistake_them(
    argument: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Muon would train them with Adam without a word: their parameter is no matrix."""
    monkeypatch.setattr(compat, "training_arguments", lambda: SimpleNamespace(**{argument: value}))
    resolve(config(**MOE))
    with pytest.raises(UnsupportedError) as refusal:
        resolve(config(**MOE, moe_grouped_gemm=True))
    assert why in refusal.value.reasons["moe_grouped_gemm"]
    assert "Leave --moe-grouped-gemm out" in refusal.value.reasons["moe_grouped_gemm"]
    monkeypatch.setattr(compat, "training_arguments", lambda: SimpleNamespace(optimizer="adam"))
    resolve(config(**MOE, moe_grouped_gemm=True))


def test_report_says_which_experts_run() -> None:
    for grouped in (False, True):
        found = {item.name for item in honoured_settings(config(**MOE, moe_grouped_gemm=grouped), TurboConfig())}
        assert ("moe_grouped_gemm" in found) == grouped


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_captured_graphs_take_quantised_linears_but_no_random_bits_and_no_state_of_transformer_engine(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "transformer_engine_is_installed", lambda: True)
    cfg = with_settings(cuda_graph_impl=impl)
    resolve(cfg)
    resolve(cfg, TurboConfig.from_dict({"precision": "mxfp4"}))
    random = TurboConfig.from_dict(
        {"modules": {"*.linear_fc2": {"precision": {"preset": "mxfp4", "dy": {"rounding": "stochastic"}}}}}
    )
    with pytest.raises(UnsupportedError, match="cuda_graph_impl") as refusal:
        resolve(cfg, random)
    assert "Set rounding: nearest" in refusal.value.reasons["cuda_graph_impl"]
    resolve(cfg, dataclasses.replace(random, linear="megatron", modules=()))
    with pytest.raises(UnsupportedError, match="cuda_graph_impl") as refusal:
        resolve(with_settings(cuda_graph_impl=impl, fp8="e4m3", fp8_recipe="mxfp8"))
    assert "--turbo-precision" in refusal.value.reasons["cuda_graph_impl"]
    resolve(with_settings(fp8="e4m3", fp8_recipe="mxfp8"))


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_weight_gradients_put_off_are_refused_in_graphs_of_layers(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python leaves them to `backward_dw`, and none of it runs when a graph is replayed: the weights would stay as they are."""
    monkeypatch.setattr(compat, "transformer_engine_is_installed", lambda: True)
    with pytest.raises(UnsupportedError, match="delay_wgrad_compute") as refusal:
        resolve(with_settings(cuda_graph_impl=impl, delay_wgrad_compute=True))
    assert f"cuda_graph_impl: '{impl}'" in refusal.value.reasons["delay_wgrad_compute"]
    resolve(with_settings(cuda_graph_impl=impl))
    resolve(with_settings(cuda_graph_impl="full_iteration", delay_wgrad_compute=True))  # holds `backward_dw` too


def test_transformer_engines_graphs_need_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "transformer_engine_is_installed", lambda: False)
    with pytest.raises(UnsupportedError, match="cuda_graph_impl") as refusal:
        resolve(with_settings(cuda_graph_impl="transformer_engine"))
    assert "Set local" in refusal.value.reasons["cuda_graph_impl"]
    resolve(with_settings(cuda_graph_impl="local"))


@pytest.mark.parametrize(
    ("attention", "backend", "fits"),
    [
        ("turbo", "auto", True),
        ("turbo", "local", False),
        ("turbo", "flash", False),
        ("megatron", "local", True),
        ("megatron", "fused", False),
        ("transformer_engine", "flash", True),
    ],
)
def test_attention_backend_must_be_one_of_the_provider(attention: str, backend: str, fits: bool) -> None:
    from megatron.core.transformer.enums import AttnBackend

    cfg = with_settings(attention_backend=AttnBackend[backend])
    if fits:
        resolve(cfg, TurboConfig(attention=attention))
    else:
        with pytest.raises(
            UnsupportedError, match=rf"attention_backend: '{backend}' is no backend of 'attention: {attention}'"
        ):
            resolve(cfg, TurboConfig(attention=attention))


def test_what_megatrons_attention_cannot_do_is_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.transformer.multi_latent_attention.HAVE_TE", False)
    turbo = TurboConfig(attention="megatron")
    for cfg in [config(context_parallel_size=2), config(**MLA)]:
        with pytest.raises(UnsupportedError, match="Megatron's own core attention cannot do it"):
            resolve(cfg, turbo)


def test_megatrons_torch_norm_under_sequence_parallelism_is_refused() -> None:
    cfg = config(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(UnsupportedError, match=r"sequence_parallel: .*norm: turbo"):
        resolve(cfg, TurboConfig(norm="megatron"))
    resolve(cfg)


def test_delayed_wgrad_needs_linears_that_can() -> None:
    with pytest.raises(UnsupportedError, match="delay_wgrad_compute"):
        resolve(with_settings(delay_wgrad_compute=True), TurboConfig(linear="megatron"))
    resolve(with_settings(delay_wgrad_compute=True))


def test_fp32_residuals_are_refused_where_they_would_meet_bf16_weights() -> None:
    """Megatron's local layers fail in their first forward pass."""
    cfg = with_settings(fp32_residual_connection=True, params_dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="fp32_residual_connection: the norms' fp32 output"):
        resolve(cfg)
    for harmless in [{"enable_autocast": True}, {"params_dtype": torch.float32}]:
        resolve(with_settings(**{"fp32_residual_connection": True, "params_dtype": torch.bfloat16, **harmless}))


def test_inference_implementation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"transformer_impl: 'inference_optimized'"):
        resolve(with_settings(transformer_impl="inference_optimized"))


def test_mla_of_016_without_transformer_engine_is_refused() -> None:
    from megatron.core.transformer import multi_latent_attention

    assert ("multi_latent_attention" in _reasons(config(**MLA))) == multi_latent_attention.HAVE_TE


def test_cp_comm_type_by_layer_is_refused_where_megatron_shifts_it() -> None:
    cfg = with_settings(context_parallel_size=2, cp_comm_type=["all_gather"] * 4)
    assert ("cp_comm_type" in _reasons(cfg)) == compat.facts().cp_comm_type_list_is_shifted


def _reasons(cfg: Any) -> dict[str, str]:
    try:
        resolve(cfg)
    except UnsupportedError as error:
        return error.reasons
    return {}


def test_unknown_setting_of_a_newer_megatron_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "primus_turbo_plugin.specs.settings.known_fields", lambda: known_fields() - {"rotary_interleaved"}
    )
    with pytest.warns(UserWarning, match=r"rotary_interleaved=True: this package does not know"):
        resolve(with_settings(rotary_interleaved=True))


def test_report_says_what_became_of_megatrons_settings() -> None:
    cfg = with_settings(fp8="hybrid", fp8_recipe="mxfp8", first_last_layers_bf16=True, delay_wgrad_compute=True)
    said = {item.name: (item.outcome, item.note) for item in honoured_settings(cfg, resolve(cfg))}
    assert said == {
        "fp8": ("honoured", "precision: mxfp8_hybrid"),
        "first_last_layers_bf16": ("honoured", "bf16_first_layers: 1, bf16_last_layers: 1"),
        "delay_wgrad_compute": ("honoured", "backward_dw"),
    }
    assert list(honoured_settings(config(), TurboConfig())) == []


def test_no_setting_no_recipe() -> None:
    assert megatron_recipe(config()) is None
    assert resolve(config()) == TurboConfig()
    assert resolve(config(**MOE)) == TurboConfig()


SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def test_megatrons_overlap_flags_become_settings_of_ours() -> None:
    flags = {"tp_comm_bulk_wgrad": False, "tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_qkv": True}
    found = resolve(with_settings(tp_comm_overlap=True, **SPLIT, **flags)).communication
    assert found == Communication(tp_overlap=True, bulk_scatter=False, scatter_dgrad=True, except_for=("qkv",))
    assert resolve(with_settings(**SPLIT, **flags)).communication == Communication()  # sub-flags of a flag that is off
    ours = TurboConfig(communication=Communication(tp_overlap=True))
    assert resolve(with_settings(**SPLIT, **flags), ours).communication == found  # and of an overlap that we turn on


def test_a_setting_of_ours_stays_when_megatron_turns_overlap_on() -> None:
    own = TurboConfig(communication=Communication(gather=False, transport="process_group"))
    found = resolve(with_settings(tp_comm_overlap=True, **SPLIT), own).communication
    assert (found.tp_overlap, found.gather, found.transport) == (True, False, "process_group")
    own = TurboConfig(communication=Communication(except_for=("fc2", "qkv"), scatter_dgrad=True))
    found = resolve(with_settings(tp_comm_overlap=True, tp_comm_overlap_disable_qkv=True, **SPLIT), own).communication
    assert (found.except_for, found.scatter_dgrad) == (("fc2", "qkv"), True)


def test_overlap_in_cuda_graphs_needs_the_transport_that_can_be_captured() -> None:
    graphs = (
        {"cuda_graph_impl": "local"} if hasattr(with_settings(), "cuda_graph_impl") else {"enable_cuda_graph": True}
    )
    asked = with_settings(**SPLIT, **graphs)
    with pytest.raises(UnsupportedError) as refusal:
        resolve(asked, TurboConfig(communication=Communication(tp_overlap=True)))
    assert "only 'sdma' can be captured" in refusal.value.reasons["communication.tp_overlap"]
    resolve(asked, TurboConfig(communication=Communication(tp_overlap=True, transport="sdma")))


def test_contradictory_overlap_names_both() -> None:
    own = TurboConfig(communication=Communication(tp_overlap=False))
    with pytest.raises(ConfigError, match=r"tp_comm_overlap \(Megatron\).*communication.tp_overlap: false"):
        resolve(with_settings(tp_comm_overlap=True, **SPLIT), own)


@pytest.mark.parametrize(
    ("flags", "own", "name", "words"),
    [
        ({"tp_comm_overlap": True}, {}, "tp_comm_overlap", "without sequence parallelism"),
        ({}, {"communication": Communication(tp_overlap=True)}, "communication.tp_overlap", "without sequence"),
        (
            {"sequence_parallel": True},
            {"communication": Communication(tp_overlap=True), "linear": "megatron", "norm": "turbo"},
            "communication.tp_overlap",
            "only linears of this package",
        ),
        (
            {"sequence_parallel": True, "tp_comm_overlap": True},
            {"linear": "megatron"},
            "tp_comm_overlap",
            "Megatron's own linears do not overlap",
        ),
    ],
)
def test_overlap_that_cannot_be_is_refused(flags: dict[str, Any], own: dict[str, Any], name: str, words: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        resolve(with_settings(tensor_model_parallel_size=2, **flags), TurboConfig(**own))
    assert words in refusal.value.reasons[name]
