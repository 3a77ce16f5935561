"""FP8 attention from the configuration, or from Megatron's setting, to the modules and the start-up report."""

from __future__ import annotations

import pytest

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.precision.attention import AttentionPrecision
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.specs.gpt import GptSpecs
from primus_turbo_plugin.specs.report import attention_rows, honoured_settings, print_report
from primus_turbo_plugin.specs.settings import resolve
from tests.specs.test_settings import with_settings

pytestmark = pytest.mark.megatron

FP8 = AttentionPrecision(format="fp8")


def test_the_plan_of_every_layers_core_attention_says_it() -> None:
    config = with_settings(num_layers=3)
    specs = GptSpecs(config, TurboConfig(attention_precision=FP8, bf16_last_layers=1), None)
    plans = [
        specs.layer(index).submodules.self_attention.submodules.core_attention.params["plan"] for index in range(3)
    ]
    assert [plan.attention.format for plan in plans] == ["fp8", "fp8", "bf16"]


def test_megatrons_setting_is_translated_and_never_overrides_more_precise_words() -> None:
    config = with_settings(fp8_dot_product_attention=True)
    turbo = resolve(config)
    assert turbo.attention_precision == FP8
    (setting,) = [item for item in honoured_settings(config, turbo) if item.name == "fp8_dot_product_attention"]
    assert setting.note.startswith("attention_precision: fp8 (e4m3")
    finer = TurboConfig(attention_precision=AttentionPrecision(format="fp8", gradients="e5m2"))
    assert resolve(config, finer).attention_precision.gradients == "e5m2"
    with pytest.raises(UnsupportedError, match="fp8_dot_product_attention"):
        resolve(config, TurboConfig(attention="megatron"))


def test_the_start_up_report_names_layers_numbers_and_emulation(capsys: pytest.CaptureFixture[str]) -> None:
    config = with_settings(num_layers=4)
    turbo = TurboConfig(attention_precision=FP8, bf16_first_layers=1)
    assert [layers for layers, _ in attention_rows(config, turbo)] == ["layers 0", "layers 1-3"]
    print_report(config, turbo, [], ResolvedConfig(config=turbo))
    said = " ".join(capsys.readouterr().out.split())
    assert "core attention layers 0 bf16 layers 1-3 fp8 (e4m3, gradients e4m3" in said
    assert "FP8 runs emulated by dequantising, numerics equal, no speed-up: cpu has no FP8 matrix units" in said
    assert attention_rows(config, TurboConfig()) == []


def test_a_pattern_that_sets_it_must_name_a_core_attention() -> None:
    pattern = {"modules": {"decoder.layers.0.mlp.*": {"attention_precision": "fp8"}}}
    with pytest.raises(ConfigError, match=r"matches no core attention of this model.*core_attention"):
        GptSpecs(with_settings(), TurboConfig.from_dict(pattern), None)
