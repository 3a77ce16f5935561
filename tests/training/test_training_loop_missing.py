"""Where the wheel has no training loop, the entry scripts say so in one line."""

from __future__ import annotations

import importlib.util

import pytest

from primus_turbo_plugin.training.pretrain import cli


def test_the_remedy_is_named_where_megatron_has_no_training_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron.training" else find(name))
    assert cli(["--device", "cpu"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: megatron-core ")
    assert "pip install 'megatron-core>=0.19'" in error
    assert "--spec primus_turbo_plugin.megatron_lm gpt_spec" in error
