"""Megatron's refusals become one line; faults keep their traceback."""

from __future__ import annotations

import pytest

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.training.refusals import one_line, refusals
from tests.training.launch_targets import require_four


def test_a_value_error_over_several_lines_becomes_one() -> None:
    with pytest.raises(ConfigError, match=r"^model: heads \(3\) must be even$") as raised, refusals("model"):
        raise ValueError("heads (3)\n   must be even")
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_bare_assertion_shows_its_condition() -> None:
    with (
        pytest.raises(ConfigError, match=r"Megatron requires 'heads == 4.*' \(launch_targets.py:\d+\)"),
        refusals("model"),
    ):
        require_four(heads=3)


def test_our_own_errors_and_faults_pass_unchanged() -> None:
    with pytest.raises(ShapeError, match=r"^shape$"), refusals("model"):
        raise ShapeError("shape")
    with pytest.raises(KeyError), refusals("model"):
        raise KeyError("fault")


def test_an_error_without_words_or_frames_is_named() -> None:
    assert one_line(ValueError()) == "ValueError"
