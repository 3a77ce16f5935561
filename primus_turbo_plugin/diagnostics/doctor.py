"""The report of `primus-turbo doctor`: device, versions, what serves each op, the configuration, and what is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from primus_turbo_plugin.devices import Device, detect
from primus_turbo_plugin.diagnostics.config_check import Problem, config_problems, installation_problems
from primus_turbo_plugin.diagnostics.inventory import Inventory, take_inventory
from primus_turbo_plugin.diagnostics.selftest import CaseResult
from primus_turbo_plugin.diagnostics.serving import Served, format_summary, who_serves
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.registry import KernelRegistry, default_registry
from primus_turbo_plugin.kernels.tuning.table import TuningTable, tuning_table
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.precision.presets import SLOTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything the doctor found.

    Attributes:
        device: What this process computes on.
        inventory: Versions and variables.
        served: Who serves typical requests of each op.
        resolved: The configuration; None where it could not be read.
        problems: What was asked for and is broken; empty for a healthy machine.
        tuning: The tuned configurations that apply; the shipped ones alone where the user's file cannot be used.
        selftest: Results of `--selftest`; None where it was not asked for.
    """

    device: Device
    inventory: Inventory
    served: tuple[Served, ...]
    resolved: ResolvedConfig | None
    problems: tuple[Problem, ...]
    tuning: TuningTable = field(default_factory=TuningTable)
    selftest: tuple[CaseResult, ...] | None = None

    @property
    def formats(self) -> dict[str, str]:
        """Format -> how its GEMMs run here."""
        return format_summary(self.device, self.served)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is odd and not broken."""
        return self.device.notes + (self.resolved.notes if self.resolved else ()) + self.tuning.notes

    @property
    def is_healthy(self) -> bool:
        """Whether everything that was asked for can be had."""
        bad = ("failed", "not run")
        return not self.problems and all(result.outcome not in bad for result in self.selftest or ())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`; docs/doctor.md describes it."""
        capabilities = dataclasses.asdict(self.device.capabilities)
        capabilities["peaks"] = [{**peak, "tflops": dict(peak["tflops"])} for peak in capabilities["peaks"]]
        return {
            "healthy": self.is_healthy,
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
            "notes": list(self.notes),
            "device": {
                "name": self.device.name,
                "count": self.device.count,
                "memory_bytes": self.device.memory_bytes,
                "capabilities": capabilities,
            },
            "package": self.inventory.package,
            "python": self.inventory.python,
            "platform": self.inventory.platform,
            "components": [dataclasses.asdict(component) for component in self.inventory.components],
            "megatron_training": self.inventory.megatron_training,
            "variables": {name: value for name, value, _ in self.inventory.variables},
            "patches": list(self.inventory.patches),
            "ops": [{**dataclasses.asdict(row), "refusals": dict(row.refusals)} for row in self.served],
            "formats": self.formats,
            "tuning": {
                "file": self.tuning.source,
                "entries": [
                    {"origin": origin, "source": source, "count": count}
                    for (origin, source), count in self.tuning.count(self.device.capabilities.arch).items()
                ],
            },
            "config": None if self.resolved is None else config_to_dict(self.resolved),
            "selftest": None if self.selftest is None else [dataclasses.asdict(result) for result in self.selftest],
        }


def config_to_dict(resolved: ResolvedConfig) -> dict[str, Any]:
    """A configuration, where its keys were set, and what each operand gets, as plain data."""
    linear = resolved.config.precision.linear()
    return {
        "values": resolved.config.to_dict(),
        "origins": dict(resolved.origins),
        "operands": {f"{gemm}.{operand}": str(linear.spec(gemm, operand)) for gemm, operand in SLOTS},
    }


def examine(
    resolved: ResolvedConfig | ConfigError,
    environ: Mapping[str, str],
    *,
    device: Device | None = None,
    registry: KernelRegistry | None = None,
    inventory: Inventory | None = None,
) -> Report:
    """Examines this machine under a configuration.

    Args:
        resolved: The configuration, or the error that reading it raised.
        environ: The environment, for the variables shown.
        device, registry, inventory: Stand-ins for the machine's own.
    """
    device = detect() if device is None else device
    registry = default_registry() if registry is None else registry
    inventory = take_inventory(environ) if inventory is None else inventory
    problems = installation_problems(inventory)
    orders = None
    if isinstance(resolved, ConfigError):
        problems.append(Problem(where="configuration", what=str(resolved), remedy=""))
    else:
        found = config_problems(resolved.config, device, registry, inventory)
        problems += found
        orders = resolved.config.kernels if not found else None
    return Report(
        device=device,
        inventory=inventory,
        served=tuple(who_serves(registry, device, orders)),
        resolved=None if isinstance(resolved, ConfigError) else resolved,
        problems=tuple(problems),
        tuning=_tuning(resolved),
    )


def _tuning(resolved: ResolvedConfig | ConfigError) -> TuningTable:
    """The table that a run would use."""
    try:
        return tuning_table(None if isinstance(resolved, ConfigError) else resolved.config.tuning_file)
    except ConfigError:  # among the problems already
        return tuning_table()
