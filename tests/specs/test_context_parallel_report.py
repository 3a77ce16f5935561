"""The start-up report says how the ranks that share a sequence attend."""

from __future__ import annotations

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.specs.report import honoured_settings
from tests.specs.test_settings import with_settings

pytestmark = pytest.mark.megatron


def said(turbo: TurboConfig | None = None, **fields: object) -> list[tuple[str, str]]:
    settings = honoured_settings(with_settings(**fields), turbo or TurboConfig())
    return [(item.value, item.note) for item in settings if item.name == "cp_comm_type"]


def test_the_algorithm_is_named_with_what_it_does() -> None:
    ((value, note),) = said(context_parallel_size=4)
    assert value == "p2p"
    assert note.startswith("ring attention")
    assert note.endswith("4 ranks")
    ((value, note),) = said(context_parallel_size=8, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 4])
    assert value == "a2a+p2p"
    assert note.endswith("2 x 4 ranks")


def test_layers_that_differ_have_a_line_each() -> None:
    rows = said(context_parallel_size=2, cp_comm_type=["a2a", "p2p", "p2p", "a2a"])
    assert [value for value, _ in rows] == ["a2a (layers 0, 3)", "p2p (layers 1-2)"]


def test_nothing_is_said_where_nothing_is_shared_or_somebody_else_attends() -> None:
    assert said() == []
    assert said(TurboConfig(attention="transformer_engine"), context_parallel_size=2) == []


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cp_comm_type must be p2p, all_gather, a2a, a2a\+p2p, got 'carrier'"):
        said(context_parallel_size=2, cp_comm_type="carrier")
