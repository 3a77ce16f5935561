"""Devices, registries and inventories that stand in for machines this one is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from packaging.requirements import Requirement

from primus_turbo_plugin.devices import Device, DeviceFacts, detect
from primus_turbo_plugin.diagnostics.inventory import Inventory, take_inventory
from primus_turbo_plugin.kernels.registry import Backend, KernelRegistry, default_registry
from primus_turbo_plugin.kernels.requests import GemmRequest, Request

GPUS = {
    "gfx942": DeviceFacts(names=("AMD Instinct MI300X",), gcn_arch="gfx942", memory_bytes=192 * 2**30),
    "gfx950": DeviceFacts(names=("AMD Instinct MI355X",) * 8, gcn_arch="gfx950", memory_bytes=288 * 2**30),
    "gfx1250": DeviceFacts(names=("AMD Instinct MI455X",), gcn_arch="gfx1250"),
    "sm90": DeviceFacts(names=("NVIDIA H200",), capability=(9, 0), memory_bytes=141 * 2**30),
}


def device(arch: str) -> Device:
    """A device of that architecture."""
    return detect(GPUS.get(arch, DeviceFacts()))


def fake_backend(
    name: str,
    supports: Callable[[Any], str | None] = lambda request: None,
    request: type[Request] = GemmRequest,
    **kernels: Callable[..., Any],
) -> Backend[Any]:
    """A backend that claims what `supports` says; its functions do nothing unless given."""
    functions = {function: (lambda *args, **kwargs: None) for function in request.functions}
    return Backend(name=name, request=request, kernels=SimpleNamespace(**functions | kernels), supports=supports)


def registry_with(*backends: Backend[Any]) -> KernelRegistry:
    """The package's registry with `backends` in front."""
    own = default_registry()
    return KernelRegistry([*backends, *(own.backend(op, name) for op in own.ops for name in own.names(op))])


def inventory(**versions: str | None) -> Inventory:
    """An inventory with these versions (`megatron_core="0.19.2"`); by default all but Transformer Engine is installed."""
    installed = {
        "torch": "2.14.0",
        "triton": "3.8.0",
        "megatron_core": "0.19.2",
        "transformer_engine": None,
        **versions,
    }
    return take_inventory(
        {},
        version_of=lambda distribution: installed.get(distribution.replace("-", "_")),
        requirements={"torch": Requirement("torch>=2.6"), "megatron-core": Requirement("megatron-core>=0.16")},
        megatron_training=True,
    )
