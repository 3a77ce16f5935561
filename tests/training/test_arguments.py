"""The command line: what belongs to the launcher, what Megatron's parser must know."""

from __future__ import annotations

import importlib.util

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.training import arguments
from tests.support.gpt_arguments import tiny_gpt


def test_the_launchers_argument_is_taken_out_and_nothing_else() -> None:
    assert arguments.without_launcher(["--nproc", "4", "--lr", "1"]) == ["--lr", "1"]
    assert arguments.without_launcher(["--lr", "1", "--nproc=4"]) == ["--lr", "1"]
    assert arguments.without_launcher(["--data-path", "nproc", "--nproc-x"]) == ["--data-path", "nproc", "--nproc-x"]


def test_run_arguments_are_read_among_all_of_megatrons() -> None:
    run = arguments.run_arguments([*tiny_gpt(), "--nproc", "4", "--turbo-spec", "megatron"])
    assert (run.device, run.nproc, run.turbo_spec) == ("cpu", 4, "megatron")
    with pytest.raises(ConfigError, match="invalid choice: 'tpu'"):
        arguments.run_arguments(["--device", "tpu"])


def test_cpu_defaults_are_arguments_of_megatron_and_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed argument would otherwise make its default vanish without a word."""
    pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    plain = vars(arguments.parse(tiny_gpt(), "cuda"))
    on_cpu = vars(arguments.parse(tiny_gpt(), "cpu"))
    assert plain.keys() >= arguments.CPU_DEFAULTS.keys()
    assert {name: on_cpu[name] for name in arguments.CPU_DEFAULTS} == arguments.CPU_DEFAULTS
    assert {name for name in plain if plain[name] != on_cpu[name]} <= arguments.CPU_DEFAULTS.keys()
    assert arguments.parse(tiny_gpt("--num-workers", "3"), "cpu").num_workers == 3


@pytest.mark.parametrize("engine", [True, False])
def test_what_only_transformer_engine_can_do_is_on_by_default_where_it_is_installed(
    engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: (object() if engine else None) if name == "transformer_engine" else find(name, *rest),
    )
    parsed = vars(arguments.parse(tiny_gpt(), "cuda"))
    assert {name: parsed[name] for name in arguments.ENGINE_ONLY_DEFAULTS} == dict.fromkeys(
        arguments.ENGINE_ONLY_DEFAULTS, engine
    )
