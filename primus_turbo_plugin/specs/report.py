"""The start-up report of a model: what its modules run, and what became of Megatron's own settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from primus_turbo_plugin.communication.tracing import trace_from_now_on
from primus_turbo_plugin.diagnostics.report import MegatronSetting, print_once, startup_report
from primus_turbo_plugin.diagnostics.tables import ranges
from primus_turbo_plugin.functional.context_parallel import DESCRIPTIONS, Algorithm, parse_algorithm
from primus_turbo_plugin.precision.config import COMPONENTS, TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.specs.agreement import backends_of_experts
from primus_turbo_plugin.specs.memory import memory_rows
from primus_turbo_plugin.specs.provider import LINEAR_CLASSES
from primus_turbo_plugin.specs.settings import megatron_recipe

_ONE_QUEUE = (
    "{}=1 puts copies and GEMMs into one hardware queue, where they run one after the other: no collective will be hidden. Unset "
    "it; nothing of this package needs it"
)
_SEPARATE_EXPERTS = "SequentialMLP: one expert after the other; --moe-grouped-gemm multiplies all at once"


def print_report(config: Any, turbo: TurboConfig, plans: Iterable[ModulePlan], resolved: ResolvedConfig) -> None:
    """Prints the report on rank 0, once.

    Args:
        config: The model's `TransformerConfig`.
        turbo: What `settings.resolve` made of it.
        plans: Plans of the model's linears.
        resolved: The configuration as the user gave it, for its notes.
    """
    if resolved.trace is not None:
        trace_from_now_on(resolved.trace)
    components = {component: getattr(turbo, component) for component in COMPONENTS}
    plans = list(plans)
    if turbo.communication.tp_overlap:
        ranks = config.tensor_model_parallel_size
        if ranks > 1:
            components["overlap"] = (
                f"collectives of {ranks} tensor-parallel ranks, transport: {turbo.communication.transport}"
            )
        notes = (*_overlap_notes(ranks, resolved), *_names_of_no_layer(turbo, plans))
        resolved = dataclasses.replace(resolved, notes=(*resolved.notes, *notes))
    if config.num_moe_experts is not None and turbo.linear == "turbo":
        grouped = f"TurboGroupedMLP: all local experts of a layer at once; {backends_of_experts(config, plans)}"
        components["experts"] = grouped if config.moe_grouped_gemm else _SEPARATE_EXPERTS
    settings = honoured_settings(config, turbo)
    memory = memory_rows(config, plans)
    attention = attention_rows(config, turbo)
    print_once(
        startup_report(
            plans, resolved=resolved, settings=settings, components=components, memory=memory, attention=attention
        )
    )


def attention_rows(config: Any, turbo: TurboConfig) -> list[tuple[str, str]]:
    """(layers, numbers) of core attention, where any layer's is quantised."""
    if turbo.attention != "turbo" or not turbo.attention_quantized_by():
        return []
    layers: dict[str, list[int]] = {}
    for layer in range(config.num_layers):
        path = f"decoder.layers.{layer}.self_attention.core_attention"
        layers.setdefault(turbo.plan(path, layer, config.num_layers).attention.name, []).append(layer)
    return [(f"layers {ranges(numbers)}", name) for name, numbers in layers.items()]


def _overlap_notes(ranks: int, resolved: ResolvedConfig) -> Iterator[str]:
    if ranks == 1:
        yield "communication.tp_overlap: true changes nothing: one tensor-parallel rank has no collectives"
        return
    its_own = "CUDA_DEVICE_MAX_CONNECTIONS" if torch.version.hip is None else "GPU_MAX_HW_QUEUES"
    if its_own in resolved.one_hardware_queue:
        yield _ONE_QUEUE.format(its_own)


def _names_of_no_layer(turbo: TurboConfig, plans: list[ModulePlan]) -> Iterator[str]:
    """Names in `except_for` that Megatron has and this model (or this pipeline stage) has not."""
    layers = {plan.path.rpartition(".")[2].removeprefix("linear_") for plan in plans}
    for name in turbo.communication.except_for:
        if plans and name.removeprefix("mtp_") not in layers:
            yield f"communication.except_for: {name} is the name of no linear here (there are {', '.join(sorted(layers))})"


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
    if config.fp8_dot_product_attention and turbo.attention == "turbo":
        yield MegatronSetting(
            name="fp8_dot_product_attention",
            value="True",
            outcome="honoured",
            note=f"attention_precision: {turbo.attention_precision.name}",
        )
    if config.context_parallel_size > 1 and turbo.attention == "turbo":
        yield from _context_parallel(config)
    if config.tp_comm_overlap and turbo.linear == "turbo":
        note = "; ".join(f"{key}: {value}" for key, value in turbo.communication.to_value().items())
        yield MegatronSetting(name="tp_comm_overlap", value="True", outcome="honoured", note=f"communication: {note}")
    for field, note in (
        ("gradient_accumulation_fusion", "wgrad accumulates into main_grad"),
        ("delay_wgrad_compute", "backward_dw"),
        ("moe_grouped_gemm", "TurboGroupedMLP"),
    ):
        without_experts = field == "moe_grouped_gemm" and config.num_moe_experts is None
        if getattr(config, field) and turbo.linear == "turbo" and not without_experts:
            yield MegatronSetting(name=field, value="True", outcome="honoured", note=note)


def _context_parallel(config: Any) -> Iterator[MegatronSetting]:
    """How the ranks that share a sequence attend, a line for each algorithm in use."""
    given = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    layers: dict[Algorithm, list[int]] = {}
    for layer, name in enumerate(given):
        layers.setdefault(parse_algorithm(name), []).append(layer)
    for algorithm, where in layers.items():
        value = algorithm if len(layers) == 1 else f"{algorithm} (layers {ranges(where)})"
        sizes = f"{config.context_parallel_size} ranks"
        if algorithm == "a2a+p2p":
            sizes = " x ".join(str(size) for size in config.hierarchical_context_parallel_sizes or ()) + " ranks"
        yield MegatronSetting(
            name="cp_comm_type", value=value, outcome="honoured", note=f"{DESCRIPTIONS[algorithm]}; {sizes}"
        )
