"""What a configuration asks for and a machine lacks."""

from __future__ import annotations

from typing import Any

import pytest

from primus_turbo_plugin.diagnostics.config_check import config_problems, installation_problems
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.presets import PRESETS
from tests.diagnostics.machines import device, fake_backend, inventory, registry_with


def problems_of(mapping: dict[str, Any], **versions: str | None) -> list[str]:
    config = TurboConfig.from_dict(mapping)
    return [str(item) for item in config_problems(config, device("cpu"), default_registry(), inventory(**versions))]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_had_on_every_machine(preset: str) -> None:
    assert problems_of({"precision": preset}) == []


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"kernels": ["refrence"]}, ["kernels", "'refrence'", "Known backends", "reference"]),
        ({"kernels": {"gemm": ["torch"]}}, ["kernels", "unknown op 'gemm'", "gemm_nt"]),
        ({"kernels": {"gemm_nt": ["tritn"]}}, ["kernels", "'tritn'"]),
        ({"kernels": {"quantize": ["torch"]}}, ["kernels", "quantize", "'torch'"]),
        ({"modules": {"*.fc2": {"kernels": ["nvcc"]}}}, ["modules['*.fc2'].kernels", "'nvcc'"]),
        ({"attention": "transformer_engine"}, ["attention: transformer_engine", "not installed", "attention: turbo"]),
        (
            {"precision": "mxfp4", "kernels": {"gemm_nt": ["torch"]}},
            ["precision: mxfp4", "plain tensors only", "kernels"],
        ),
        ({"modules": {"*.fc2": {"precision": "mxfp8", "kernels": ["torch"]}}}, ["modules['*.fc2']: mxfp8", "plain"]),
        ({"precision": "mxfp8", "modules": {"*.fc2": {"kernels": ["torch"]}}}, ["modules['*.fc2']: mxfp8", "plain"]),
    ],
)
def test_what_cannot_be_had_is_a_problem_with_key_and_remedy(mapping: dict[str, Any], words: list[str]) -> None:
    found = problems_of(mapping)
    assert found
    assert any(all(word in item for word in words) for item in found), found


def test_wrong_name_is_said_once_and_not_again_for_every_recipe_it_spoils() -> None:
    assert len(problems_of({"precision": "mxfp4", "kernels": ["refrence"], "modules": {"*.fc2": "mxfp8"}})) == 1


def test_installed_provider_is_no_problem() -> None:
    assert problems_of({"norm": "transformer_engine"}, transformer_engine="2.9.0") == []
    assert problems_of({"linear": "megatron", "norm": "megatron"}) == []
    assert problems_of({"linear": "megatron"}, megatron_core=None) != []


def test_recipe_is_not_checked_against_kernels_where_the_linears_are_anothers() -> None:
    assert problems_of({"linear": "megatron", "kernels": {"gemm_nt": ["torch"]}}) == []


def test_backend_that_refuses_on_this_device_is_a_problem_there() -> None:
    picky = fake_backend("picky", lambda request: "needs gfx950" if request.device == "cpu" else None, GemmRequest)
    config = TurboConfig.from_dict({"precision": "mxfp4", "kernels": {"gemm_nt": ["picky"]}})
    cpu = config_problems(config, device("cpu"), registry_with(picky), inventory())
    assert len(cpu) == 1  # one problem, not one a GEMM
    assert "picky: needs gfx950" in cpu[0].what
    assert config_problems(config, device("gfx950"), registry_with(picky), inventory()) == []


def test_missing_requirement_is_an_installation_problem_with_a_command() -> None:
    assert installation_problems(inventory()) == []
    (problem,) = installation_problems(inventory(megatron_core="0.15.0"))
    assert str(problem) == (
        "megatron-core: megatron-core>=0.16 is required, 0.15.0 is installed. Get it: pip install 'megatron-core>=0.16'."
    )


def test_norm_and_attention_that_nobody_may_serve_are_problems() -> None:
    """`kernels: torch` leaves out the reference, which alone has norms and attention on a CPU."""
    problems = [str(problem) for problem in problems_of({"kernels": ["torch"]})]
    assert any("'norm'" in text and "torch: has no kernels" in text for text in problems)
    assert any("'attention'" in text for text in problems)
    assert problems_of({"kernels": ["torch"], "norm": "megatron", "attention": "megatron"}) == []
    assert problems_of({"kernels": ["torch", "reference"]}) == []
