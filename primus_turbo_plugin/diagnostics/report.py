"""The start-up report of a training run: the doctor's findings, and which modules run in which precision."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from primus_turbo_plugin.devices import Device, detect
from primus_turbo_plugin.diagnostics.serving import Served, attention_status, format_summary, who_serves
from primus_turbo_plugin.diagnostics.tables import ranges, section
from primus_turbo_plugin.kernels.registry import KernelRegistry, default_registry
from primus_turbo_plugin.kernels.tuning.table import TuningTable, tuning_table
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSetting:
    """What became of one of Megatron's own settings.

    Attributes:
        name: As Megatron calls it, `fp8` or `--tp-comm-overlap`.
        value: What it was set to.
        outcome: `honoured`, or `refused` where a run goes on without it on the user's word.
        note: How it is honoured, or why it is refused and what to do.
    """

    name: str
    value: str
    outcome: Literal["honoured", "refused"]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRow:
    """Modules that run alike.

    Attributes:
        modules: Path with `*` for the layer number.
        layers: Ranges of layer numbers; empty outside the layers.
        recipe: The recipe's name.
        reason: The setting that decided it.
    """

    modules: str
    layers: str
    recipe: str
    reason: str


def precision_rows(plans: Iterable[ModulePlan]) -> list[PrecisionRow]:
    """Groups plans by (path without layer number, recipe, reason), in the order the modules first appear."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for plan in plans:
        path = plan.path
        if plan.layer_number is not None:
            path = re.sub(rf"\blayers\.{plan.layer_number}\b", "layers.*", path, count=1)
        numbers = groups.setdefault((path, plan.recipe, plan.reason), [])
        if plan.layer_number is not None:
            numbers.append(plan.layer_number)
    order = {path: position for position, path in enumerate(dict.fromkeys(path for path, _, _ in groups))}
    rows = sorted(groups.items(), key=lambda item: (order[item[0][0]], min(item[1], default=-1)))
    return [
        PrecisionRow(modules=path, layers=ranges(numbers), recipe=recipe, reason=reason)
        for (path, recipe, reason), numbers in rows
    ]


def startup_report(
    plans: Iterable[ModulePlan],
    *,
    resolved: ResolvedConfig | None = None,
    settings: Iterable[MegatronSetting] = (),
    components: Mapping[str, str] | None = None,
    memory: Iterable[tuple[str, str]] = (),
    attention: Iterable[tuple[str, str]] = (),
    device: Device | None = None,
    registry: KernelRegistry | None = None,
) -> str:
    """The report as text.

    Args:
        plans: The plan of every module of the whole model that follows one.
        resolved: The configuration, for its notes and kernel orders.
        settings: What became of Megatron's own settings.
        components: Component -> who provides it, where that is worth a line (`attention` -> `megatron`).
        memory: What the linears keep for backward (`memory_report.startup_rows`).
        attention: (layers, numbers that their core attention multiplies); empty where it multiplies tensors as they come.
        device, registry: Stand-ins for the machine's own.
    """
    device = detect() if device is None else device
    registry = default_registry() if registry is None else registry
    plans = list(plans)
    served = who_serves(registry, device, resolved.config.kernels if resolved else None)
    attention = list(attention)
    if attention:
        attention.append(("FP8 runs", attention_status(device, served)))
    rows = [(row.modules, row.layers or "-", row.recipe, row.reason) for row in precision_rows(plans)]
    tuning = tuning_table(resolved.config.tuning_file if resolved else None)
    notes = device.notes + (resolved.notes if resolved else ()) + tuning.notes
    blocks = [
        section("primus-turbo: device", [(device.name, f"{device.capabilities.arch}, {device.count} visible")]),
        section("primus-turbo: formats", [*format_summary(device, _used(served, plans)).items()]),
        section("primus-turbo: kernels", kernel_rows(served)),
        section("primus-turbo: kernels passed over", passed_over_rows(served)),
        section("primus-turbo: components", [*(components or {}).items()]),
        section("primus-turbo: precision", [("module", "layers", "recipe", "decided by"), *rows] if rows else ()),
        section("primus-turbo: core attention", attention),
        section("primus-turbo: kept for backward by linears (predicted)", memory),
        section("primus-turbo: tuned configurations", tuning_rows(tuning, device)),
        section(
            "primus-turbo: Megatron's settings",
            [(item.outcome, f"{item.name} = {item.value}", item.note) for item in settings],
        ),
        section("primus-turbo: notes", [("-", note) for note in notes]),
    ]
    return "\n".join(line for block in blocks for line in block)


def tuning_rows(table: TuningTable, device: Device) -> list[tuple[str, str]]:
    """How many tuned configurations there are for this device, and what serves the other cases."""
    arch = device.capabilities.arch
    if arch == "cpu":
        return []
    counts = table.count(arch)
    rows = [(origin, f"{count} {source}") for (origin, source), count in counts.items()]
    if not any(source == "measured" for _, source in counts):
        rows.append(
            ("-", f"none measured for {arch}: kernels run the package's defaults; `primus-turbo tune` measures")
        )
    return rows


def kernel_rows(served: Iterable[Served]) -> list[tuple[str, str]]:
    """Op -> the backends that serve its typical requests."""
    by_op: dict[str, list[str]] = {}
    for row in served:
        by_op.setdefault(row.op, []).append(row.backend or "nobody")
    return [(op, ", ".join(dict.fromkeys(names))) for op, names in by_op.items()]


def passed_over_rows(served: Iterable[Served]) -> list[tuple[str, str, str]]:
    """(op, backend, why) of backends that an order named or that are written for this device, and that do not serve."""
    found = {(row.op, name, f"{reason}; {row.backend} serves instead"): None
             for row in served if row.backend for name, reason in row.notable}  # fmt: skip
    return list(found)


def _used(served: Iterable[Served], plans: Iterable[ModulePlan]) -> list[Served]:
    """Of the rows about GEMMs, those in formats that some module's plan has."""
    slots = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
    used = {str(getattr(plan.precision, slot).format) for plan in plans for slot in slots}
    return [row for row in served if set(row.formats) <= used]


def print_once(text: str, *, rank: int | None = None) -> None:
    """Prints `text` on rank 0 only, and each text only once in a process (a spec is built once a virtual pipeline stage).

    Args:
        text: What to print.
        rank: Global rank; None asks torch.distributed, and takes 0 where it is not initialised.
    """
    if rank is None:
        distributed = torch.distributed
        rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    if rank == 0:
        _print(text)


@functools.lru_cache(maxsize=16)
def _print(text: str) -> None:
    print(text, flush=True)
