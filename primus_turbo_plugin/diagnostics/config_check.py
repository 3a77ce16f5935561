"""Whether what a configuration asks for can be had here: kernels, components, devices. Each problem with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from primus_turbo_plugin.devices import Device
from primus_turbo_plugin.diagnostics.inventory import Inventory
from primus_turbo_plugin.diagnostics.serving import unserved
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.registry import KernelRegistry
from primus_turbo_plugin.kernels.tuning.table import tuning_table
from primus_turbo_plugin.precision.config import COMPONENTS, TurboConfig
from primus_turbo_plugin.precision.module_plan import KernelOrders


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that was asked for and is broken.

    Attributes:
        where: The key or the component.
        what: What is wrong.
        remedy: What to do.
    """

    where: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} {self.remedy}".strip()


def installation_problems(inventory: Inventory) -> list[Problem]:
    """Requirements of this package that are missing or too old."""
    return [
        Problem(where=item.name, what=f"{item.problem}.", remedy=f"Get it: {item.remedy}.")
        for item in inventory.components
        if item.problem
    ]


def config_problems(
    config: TurboConfig, device: Device, registry: KernelRegistry, inventory: Inventory
) -> list[Problem]:
    """What `config` asks for and this machine lacks; empty where a training run may start."""
    problems = [*_order_problems(config, registry), *_tuning_problems(config)]
    problems += _component_problems(config, inventory)
    if not problems:
        problems += _serving_problems(config, device, registry)
    return problems


def _all_orders(config: TurboConfig) -> Iterator[tuple[str, KernelOrders]]:
    yield "kernels", config.kernels
    for override in config.modules:
        if override.kernels is not None:
            yield f"modules[{override.pattern!r}].kernels", override.kernels


def _order_problems(config: TurboConfig, registry: KernelRegistry) -> Iterator[Problem]:
    """Ops and backends that do not exist."""
    known = sorted({name for op in registry.ops for name in registry.names(op)})
    for where, orders in _all_orders(config):
        for name in orders.default:
            if name not in known:
                remedy = f"Known backends: {', '.join(known)}."
                yield Problem(where=where, what=f"no backend is named {name!r}.", remedy=remedy)
        for op, order in orders.by_op:
            try:
                for name in order:
                    registry.backend(op, name)
            except ConfigError as error:
                yield Problem(where=where, what=str(error), remedy="")


def _tuning_problems(config: TurboConfig) -> Iterator[Problem]:
    """A tuning file that cannot be used."""
    try:
        tuning_table(config.tuning_file)
    except ConfigError as error:
        yield Problem(where="tuning_file", what=str(error), remedy="")


def _component_problems(config: TurboConfig, inventory: Inventory) -> Iterator[Problem]:
    """Providers that are not installed."""
    packages = {"megatron": "megatron-core", "transformer_engine": "transformer-engine"}
    for component in COMPONENTS:
        provider = getattr(config, component)
        package = packages.get(provider)
        if package is not None and inventory.component(package).version is None:
            remedy = f"Install it ({inventory.component(package).remedy}), or set '{component}: turbo'."
            yield Problem(where=f"{component}: {provider}", what=f"{package} is not installed.", remedy=remedy)


def _serving_problems(config: TurboConfig, device: Device, registry: KernelRegistry) -> Iterator[Problem]:
    """What no allowed backend does on this device: GEMMs and quantisations of the recipes, norms, attention."""
    yield from _component_serving_problems(config, device, registry)
    if config.linear != "turbo":
        return
    asked = [("precision", config.precision, config.kernels)]
    asked += [
        (f"modules[{item.pattern!r}]", item.precision or config.precision, item.kernels or config.kernels)
        for item in config.modules
    ]
    for where, recipe, orders in asked:
        for missing in unserved(recipe.linear(), orders, registry, device.torch_device):
            remedy = f"Allow another backend for {missing.op!r} in 'kernels', or choose another recipe."
            yield Problem(where=f"{where}: {recipe.name}", what=f"{missing}.", remedy=remedy)


def _component_serving_problems(config: TurboConfig, device: Device, registry: KernelRegistry) -> Iterator[Problem]:
    """Norm and attention, where they are ours and the order of backends leaves out everyone who could serve them."""
    for component in ("norm", "attention"):
        if getattr(config, component) != "turbo":
            continue
        wanted = config.kernels.get(component)
        choices = registry.explain(device.torch_device, {component: wanted} if wanted else None)
        mine = [choice for choice in choices if choice.request.op == component]
        if mine and not any(choice.backend for choice in mine):
            reasons = "; ".join(f"{name}: {why}" for name, why in mine[0].refusals.items())
            yield Problem(
                where=f"kernels: {', '.join(wanted or ())}",
                what=f"no allowed backend can do {mine[0].request} ({reasons}).",
                remedy=f"Allow another backend for {component!r} in 'kernels', or set '{component}: megatron'.",
            )
