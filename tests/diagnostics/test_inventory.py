"""Versions and variables, found without importing what they are about."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from primus_turbo_plugin import __version__
from primus_turbo_plugin.diagnostics.inventory import (
    COMPONENTS,
    has_megatron_training,
    installed_version,
    take_inventory,
)
from tests.diagnostics.machines import inventory


def test_this_machine_is_described_as_it_is() -> None:
    found = take_inventory({"PATH": "/bin"})
    assert (found.package, found.python) == (__version__, platform.python_version())
    assert found.component("torch").version is not None
    assert torch.__version__.startswith(str(found.component("torch").version).split("+")[0])
    assert found.component("megatron-core").version == installed_version("megatron-core")
    assert found.patches == ()
    assert found.variables == ()


def test_installed_version_of_what_is_not_there_is_none() -> None:
    assert installed_version("surely-no-such-distribution") is None


def test_every_component_says_what_it_is_for_and_how_to_get_it() -> None:
    found = inventory()
    assert [item.name for item in found.components] == list(COMPONENTS)
    assert all(item.needed_for and item.remedy for item in found.components)


def test_rocm_builds_of_triton_count_as_triton() -> None:
    assert inventory(triton=None, pytorch_triton_rocm="3.5.0").component("triton").version == "3.5.0"
    assert inventory(triton=None).component("triton").version is None


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("0.19.2", None),
        ("0.16.0", None),
        ("0.17.0rc0", None),
        ("0.15.3", "megatron-core>=0.16 is required, 0.15.3 is installed"),
        (None, "megatron-core>=0.16 is required and not installed"),
    ],
)
def test_requirement_that_is_missing_or_too_old_is_a_problem(version: str | None, problem: str | None) -> None:
    assert inventory(megatron_core=version).component("megatron-core").problem == problem


def test_optional_component_that_is_missing_is_no_problem() -> None:
    assert inventory(triton=None, transformer_engine=None).component("transformer-engine").problem is None
    assert inventory(triton=None).component("triton").problem is None


def test_variables_that_matter_are_shown_with_their_meaning() -> None:
    found = take_inventory({"PRIMUS_TURBO_CONFIG": "r.yaml", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "HOME": "/root"})
    assert [(name, value) for name, value, _ in found.variables] == [
        ("PRIMUS_TURBO_CONFIG", "r.yaml"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    ]
    assert all(meaning for _, _, meaning in found.variables)


def test_megatron_training_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.machinery

    spec = importlib.machinery.ModuleSpec("megatron", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert not has_megatron_training()
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").touch()
    assert has_megatron_training()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not has_megatron_training()
