"""The `attention_precision` setting: read, refused, written back, and what layers get by it."""

from __future__ import annotations

from typing import Any

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.attention import AttentionPrecision
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import resolve

FP8 = AttentionPrecision(format="fp8")


def attention_of(config: TurboConfig, layer: int, num_layers: int = 4) -> AttentionPrecision:
    return config.plan(f"decoder.layers.{layer}.self_attention.core_attention", layer, num_layers).attention


@pytest.mark.parametrize("value", ["bf16", "fp8", {"format": "fp8", "gradients": "e5m2"}])
def test_settings_round_trip(value: Any) -> None:
    config = TurboConfig.from_dict({"attention_precision": value})
    assert config.attention_precision.to_value() == value
    assert TurboConfig.from_yaml_text(config.to_yaml()) == config
    assert attention_of(config, 1) == config.attention_precision
    hash(config)


def test_names_that_mean_the_same() -> None:
    assert AttentionPrecision.from_value("fp8_e4m3") == AttentionPrecision.from_value({"format": "fp8"}) == FP8
    assert AttentionPrecision.from_value({"format": "fp8", "gradients": "e4m3"}).to_value() == "fp8"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("mxfp4", "mxfp4 makes no sense for attention: one mantissa bit"),
        ("mxfp8", "mxfp8 makes no sense for attention: its blocks of 32 lie along the contraction"),
        ("nvfp4", "nvfp4 makes no sense"),
        ("fp8_e5m2", "fp8_e5m2 makes no sense for attention: two mantissa bits"),
        ("fp9", "did you mean 'fp8'"),
        ({"format": "fp8", "gradients": "e2m1"}, "gradients: must be one of e4m3, e5m2, bf16; got 'e2m1'"),
        ({"format": "fp8", "block": 64}, "unknown key 'block'"),
        ({"gradients": "e5m2"}, "gradients: e5m2 needs 'format: fp8'"),
        (3, "must be a mapping"),
    ],
)
def test_impossible_values_are_named(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="attention_precision") as refusal:
        TurboConfig.from_dict({"attention_precision": value})
    assert words in str(refusal.value)


def test_patterns_and_bf16_layers_decide_layer_by_layer() -> None:
    config = TurboConfig.from_yaml_text(
        """
        attention_precision: fp8
        bf16_first_layers: 1
        modules:
          "decoder.layers.2.self_attention.core_attention": {attention_precision: bf16}
          "decoder.layers.3.*": {attention_precision: {format: fp8, gradients: bf16}}
        """
    )
    assert TurboConfig.from_yaml_text(config.to_yaml()) == config
    found = [attention_of(config, layer) for layer in range(4)]
    assert found == [
        AttentionPrecision(),
        FP8,
        AttentionPrecision(),
        AttentionPrecision(format="fp8", gradients="bf16"),
    ]
    assert config.attention_quantized_by()[0] == "attention_precision: fp8"
    assert len(config.attention_quantized_by()) == 2
    with pytest.raises(ConfigError, match="leave none of the 1 layers to 'attention_precision: fp8'"):
        attention_of(config, 0, num_layers=1)


def test_another_providers_attention_does_not_follow_it() -> None:
    with pytest.raises(
        ConfigError, match=r"attention: 'megatron' contradicts attention_precision: fp8.*Set 'attention: turbo'"
    ):
        TurboConfig(attention="megatron", attention_precision=FP8)
    text = 'attention: megatron\nmodules: {"*": {attention_precision: fp8}}'
    with pytest.raises(ConfigError, match=r"contradicts modules\['\*'\].attention_precision: fp8"):
        TurboConfig.from_yaml_text(text)


def test_bf16_layers_are_of_use_to_quantised_attention_alone() -> None:
    assert resolve() is not None
    config = TurboConfig(bf16_first_layers=1, attention_precision=FP8)
    from primus_turbo_plugin.precision.config_sources import _idle_settings

    assert _idle_settings(config) == []
    assert len(_idle_settings(TurboConfig(bf16_first_layers=1))) == 1
