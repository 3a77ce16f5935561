"""The start-up report of a model: what its modules run, and what became of Megatron's own settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from primus_turbo_plugin.diagnostics.report import MegatronSetting, print_once, startup_report
from primus_turbo_plugin.precision.config import COMPONENTS, TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.specs.provider import LINEAR_CLASSES
from primus_turbo_plugin.specs.settings import megatron_recipe


def print_report(config: Any, turbo: TurboConfig, plans: Iterable[ModulePlan], resolved: ResolvedConfig) -> None:
    """Prints the report on rank 0, once.

    Args:
        config: The model's `TransformerConfig`.
        turbo: What `settings.resolve` made of it.
        plans: Plans of the model's linears.
        resolved: The configuration as the user gave it, for its notes.
    """
    components = {component: getattr(turbo, component) for component in COMPONENTS}
    settings = honoured_settings(config, turbo)
    print_once(startup_report(plans, resolved=resolved, settings=settings, components=components))


def plans_of(model: torch.nn.Module) -> list[ModulePlan]:
    """The plans of the linears in a model that has been built, each path once."""
    linears: list[Any] = [module for module in model.modules() if isinstance(module, LINEAR_CLASSES)]
    return list({linear.plan.path: linear.plan for linear in linears}.values())


def honoured_settings(config: Any, turbo: TurboConfig) -> Iterator[MegatronSetting]:
    """Megatron's own settings that changed what the modules run."""
    asked = megatron_recipe(config) if turbo.linear == "turbo" else None
    if asked is not None:
        field, note = ("fp8" if config.fp8 else "fp4"), f"precision: {turbo.precision.name}"
        yield MegatronSetting(name=field, value=asked[0].partition(": ")[2], outcome="honoured", note=note)
    if config.first_last_layers_bf16 and turbo.linear == "turbo":
        note = f"bf16_first_layers: {turbo.bf16_first_layers}, bf16_last_layers: {turbo.bf16_last_layers}"
        yield MegatronSetting(name="first_last_layers_bf16", value="True", outcome="honoured", note=note)
    for field, note in (
        ("gradient_accumulation_fusion", "wgrad accumulates into main_grad"),
        ("delay_wgrad_compute", "backward_dw"),
    ):
        if getattr(config, field) and turbo.linear == "turbo":
            yield MegatronSetting(name=field, value="True", outcome="honoured", note=note)
