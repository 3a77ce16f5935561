"""The `communication` settings: read, refused and written back."""

from __future__ import annotations

from typing import Any

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.communication import Communication
from primus_turbo_plugin.precision.config import TurboConfig


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"tp_overlap": True},
        {"tp_overlap": False, "transport": "sdma", "min_gemm_ms": 0.25, "chunks": 2},
        {"gather": False, "scatter_dgrad": True, "except_for": ["qkv", "fc1"]},
    ],
)
def test_settings_round_trip(value: dict[str, Any]) -> None:
    config = TurboConfig.from_dict({"communication": value})
    assert config.communication.to_value() == value
    assert TurboConfig.from_yaml_text(config.to_yaml()) == config
    assert config.plan("decoder.layers.0.mlp.linear_fc1").communication == config.communication
    hash(config)


def test_true_and_false_stand_for_the_overlap() -> None:
    assert Communication.from_value(True) == Communication(tp_overlap=True)
    assert TurboConfig.from_yaml_text("communication: false").communication.tp_overlap is False
    assert Communication.from_value({"except_for": "fc1"}).except_for == ("fc1",)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"transport": "sdam"}, "did you mean 'sdma'"),
        ({"tp_overlp": True}, "did you mean 'tp_overlap'"),
        ({"tp_overlap": "yes"}, "tp_overlap: must be true, false or left out; got 'yes'"),
        ({"gather": 1.5}, "gather: must be true or false"),
        ({"min_gemm_ms": -1}, "min_gemm_ms: must be a time in ms"),
        ({"min_gemm_ms": True}, "min_gemm_ms"),
        ({"min_gemm_ms": float("nan")}, "min_gemm_ms"),
        ({"chunks": 0}, "chunks: must be 1 to 4; got 0"),
        ({"chunks": 5}, "chunks"),
        ({"except_for": [1]}, "except_for: must be names"),
        ({"except_for": ["qkv", "fc3"]}, "got 'fc3'; did you mean 'fc"),
        (
            {"except_for": "decoder.layers.0.mlp.linear_fc2"},
            "linear_fc2'; did you mean 'fc2'?",
        ),
        ("sdma", "must be a mapping"),
    ],
)
def test_impossible_values_are_named(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="communication") as refusal:
        TurboConfig.from_dict({"communication": value})
    assert words in str(refusal.value)
