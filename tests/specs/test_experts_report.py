"""The start-up report names the class that runs the experts, and who multiplies for them."""

from __future__ import annotations

import pytest

from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.specs.gpt import GptSpecs
from primus_turbo_plugin.specs.report import print_report
from tests.specs.configs import MOE, config

pytestmark = pytest.mark.megatron


def _report(capsys: pytest.CaptureFixture[str], *, grouped: bool, **turbo: object) -> str:
    from primus_turbo_plugin.diagnostics import report

    report._print.cache_clear()
    model, choice = config(**MOE, moe_grouped_gemm=grouped, params_dtype=_bf16()), TurboConfig.from_dict(turbo)
    specs = GptSpecs(model, choice, None)
    print_report(model, specs.turbo, specs.linear_plans(), ResolvedConfig(config=choice))
    return " ".join(capsys.readouterr().out.split())


def _bf16() -> object:
    import torch

    return torch.bfloat16


def test_grouped_experts_are_shown_with_the_backend_of_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = {"grouped_gemm": ["reference"], "default": ["torch", "reference"]}
    report = _report(capsys, grouped=True, precision="mxfp4", bf16_first_layers=1, kernels=kernels)
    assert "TurboGroupedMLP: all local experts of a layer at once; bf16 by reference; mxfp4 by reference" in report
    assert report.count("reference: one product an expert; waits for the GPU to learn how many tokens each has") == 1


def test_experts_one_by_one_are_shown_with_the_flag_that_groups_them(capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(capsys, grouped=False)
    assert "SequentialMLP" in report
    assert "--moe-grouped-gemm" in report
    assert "experts" not in _report(capsys, grouped=False, linear="megatron").split("primus-turbo: precision")[0]


def test_memory_is_predicted_of_experts_unless_their_width_is_another() -> None:
    """`moe_latent_size`: experts see fewer features than the model has, which the prediction does not know."""
    from primus_turbo_plugin.specs.memory import memory_rows

    turbo = TurboConfig.from_dict({"precision": "mxfp4"})
    for fields, predicted in (({}, True), ({"moe_latent_size": 16}, False)):
        model = config(**MOE, moe_grouped_gemm=True, params_dtype=_bf16(), **fields)
        assert bool(memory_rows(model, GptSpecs(model, turbo, None).linear_plans())) == predicted, fields
