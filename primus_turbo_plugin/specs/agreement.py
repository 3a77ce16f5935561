"""All ranks of a job build the same model: compared where its specs are built, before anything is allocated."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from primus_turbo_plugin.communication.agreement import agree
from primus_turbo_plugin.diagnostics.report import precision_rows
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.functional.grouped_linear_kernels import GroupedLinearKernels
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.kernels.tuning.table import tuning_table
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.specs.provider import GROUPED_CLASSES


def agree_on_model(config: Any, turbo: TurboConfig, modules: Mapping[str, type], plans: Iterable[ModulePlan]) -> None:
    """Compares what this rank is about to build with the other ranks: recipes, kernels, tuned configurations.

    Args:
        config: The model's `TransformerConfig`.
        turbo: What `settings.resolve` made of it.
        modules: Path -> class over all pipeline stages; tells models of one job apart.
        plans: The plans of all linears.

    Raises:
        ConfigError: Another rank builds it otherwise; names both and the remedy.
    """
    plans = list(plans)
    grouped = {path for path, kind in modules.items() if kind in GROUPED_CLASSES}
    choices = {
        **_recipes(plans),
        **_kernels(config, [plan for plan in plans if plan.path not in grouped], LinearKernels, "kernels"),
        **_kernels(config, [plan for plan in plans if plan.path in grouped], GroupedLinearKernels, "experts' kernels"),
    }
    choices["seeds"] = f"signs {turbo.signs_seed}, rounding {turbo.rounding_seed}"
    choices["tuned configurations"] = tuning_table(turbo.tuning_file).digest
    structure = repr((config.num_layers, config.hidden_size, config.ffn_hidden_size, sorted(modules)))
    agree(f"the model (structure {hashlib.sha256(structure.encode()).hexdigest()[:8]})", choices)


def _recipes(plans: Iterable[ModulePlan]) -> dict[str, str]:
    """Module -> its recipe, and in which layers."""
    found: dict[str, list[str]] = {}
    for row in precision_rows(plans):
        found.setdefault(row.modules, []).append(f"{row.recipe} in layers {row.layers}" if row.layers else row.recipe)
    return {modules: ", ".join(said) for modules, said in found.items()}


def _kernels(config: Any, plans: Iterable[ModulePlan], choice: Any, what: str) -> dict[str, str]:
    """Who serves each kind of linear here. One that nobody serves is refused when it is first run, with every reason."""
    found = {}
    for plan in {(plan.precision, plan.kernels, plan.tuning_file): plan for plan in plans}.values():
        order = plan.kernels.to_value() or "default"
        try:
            kernels = _select(config, plan, choice)
            chosen = ", ".join(f"{name} {backend}" for name, backend in kernels.choices.items())
        except UnsupportedError as error:
            chosen = "; ".join(f"{name}: {reason}" for name, reason in error.reasons.items())
        found[f"{what} of {plan.recipe} in order {order}"] = chosen
    return found


def _select(config: Any, plan: ModulePlan, choice: Any) -> Any:
    """The kernels that `choice` takes for a linear of this model on this device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fused, dtype = bool(config.gradient_accumulation_fusion), config.params_dtype
    return choice.select(plan, device, dtype, wgrad_dtype=torch.float32 if fused else dtype, accumulate=fused)


def backends_of_experts(config: Any, plans: Iterable[ModulePlan]) -> str:
    """Who multiplies for grouped experts, by recipe, and what a name does not tell: `mxfp4 by triton; bf16 by torch`.

    Args:
        config: The model's `TransformerConfig`.
        plans: Of the model's linears; those of routed experts count.
    """
    found: dict[str, None] = {}
    notes: dict[str, None] = {}
    for plan in {plan.recipe: plan for plan in plans if re.search(r"\.experts\.linear_fc[12]$", plan.path)}.values():
        try:
            gemms = _select(config, plan, GroupedLinearKernels).gemms.values()
            names = dict.fromkeys(backend.name for backend in gemms)
            found[f"{plan.recipe} by {', '.join(names)}"] = None
            notes |= {f"{backend.name}: {backend.note}": None for backend in gemms if backend.note}
        except UnsupportedError:
            found[f"{plan.recipe} by nobody here"] = None
    return "; ".join([*found, *notes])
