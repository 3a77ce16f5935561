"""Gives every module of this package in a spec tree the `ModulePlan` of its path.

A layer's spec is built once, unbound; `bind` copies it for one layer, walking `ModuleSpec`, dataclasses of submodules and
`functools.partial(..., submodules=...)` alike. No module looks up its own name at run time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.modules import TurboDotProductAttention, TurboLinear
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.specs.provider import LINEAR_CLASSES, TURBO_CLASSES

#: Slots whose module has another name in the model. The inner layer of MTP is named as checkpoints name it in every release.
_MODULE_NAMES = {"mtp_model_layer": "transformer_layer", "layer_norm": "final_layernorm"}


class DownProjection(ModuleSpec):
    """A spec of `TurboLinear` that MLA accepts as a down projection.

    MLASelfAttention takes a down projection only if it is `in` a list of classes it knows, which asks each class whether it
    equals the spec; this one equals ColumnParallelLinear. It is then built by its own class, which keeps the whole weight
    on every rank, as Transformer Engine's does. Delete when MLASelfAttention takes any module.
    """

    def __eq__(self, other: object) -> bool:
        return other is ColumnParallelLinear or super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def bind(spec: Any, path: str, plan: Callable[[str], ModulePlan]) -> Any:
    """A copy of `spec` in which every turbo class is `ModuleSpec(cls, params={"plan": plan(its path)})`.

    Args:
        spec: A ModuleSpec, class, partial or dataclass of submodules; anything else is returned as it is.
        path: Path of the module that `spec` builds, `decoder.layers.7`.
        plan: Path -> plan.
    """
    return _bind(spec, path, lambda module, _: plan(module))


def _bind(spec: Any, path: str, plan: Callable[[str, type], ModulePlan]) -> Any:
    if isinstance(spec, ModuleSpec):
        params = dict(spec.params)
        if spec.module in TURBO_CLASSES:
            params["plan"] = plan(path, spec.module)
        kind = DownProjection if _is_down_projection(spec.module, path) else type(spec)
        submodules = _bind(spec.submodules, path, plan)
        return kind(module=spec.module, params=params, submodules=submodules, metainfo=dict(spec.metainfo))
    if isinstance(spec, type):
        return _bind(ModuleSpec(module=spec), path, plan) if spec in TURBO_CLASSES else spec
    if isinstance(spec, functools.partial) and "submodules" in spec.keywords:
        keywords = {**spec.keywords, "submodules": _bind(spec.keywords["submodules"], path, plan)}
        return functools.partial(spec.func, *spec.args, **keywords)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        slots = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        bound = {name: _bind(slot, _child(path, name), plan) for name, slot in slots.items()}
        return dataclasses.replace(spec, **bound)
    return spec


def bind_layer(spec: Any, path: str, turbo: TurboConfig, layer: int | None, num_layers: int) -> Any:
    """`bind` with the plans of `turbo` for decoder layer `layer` (global, from 0), or for a module outside them (None)."""
    return bind(spec, path, lambda module: turbo.plan(module, layer, num_layers))


def modules_of(spec: Any, path: str) -> dict[str, type]:
    """Path -> class of the turbo modules in `spec`."""
    found: dict[str, type] = {}

    def note(module: str, kind: type) -> ModulePlan:
        found[module] = kind
        return ModulePlan(path=module)

    _bind(spec, path, note)
    return found


def require_matches(turbo: TurboConfig, modules: Mapping[str, type]) -> None:
    """Checks that every pattern names a module, one that sets a precision a linear, one that sets attention's a core attention.

    Args:
        turbo: The configuration.
        modules: Path -> class over the whole model, all pipeline stages.

    Raises:
        ConfigError: A pattern matches nothing, so that what it asks for would silently not happen.
    """
    linears = [path for path, kind in modules.items() if kind in LINEAR_CLASSES]
    for item in turbo.modules:
        sets_precision = item.precision is not None or item.padding is not None
        candidates, what = (linears, "linear") if sets_precision else (list(modules), "module")
        if item.attention_precision is not None and not sets_precision:
            candidates = [path for path, kind in modules.items() if kind is TurboDotProductAttention]
            what = "core attention"
        if not any(item.matches(path) for path in candidates):
            examples = ", ".join(candidates[:4]) or "none, since every component is another provider's"
            raise ConfigError(
                f"modules: {item.pattern!r} matches no {what} of this model. "
                f"Correct or remove the pattern; those are named {examples}."
            )


def _child(path: str, slot: str) -> str:
    return f"{path}.{_MODULE_NAMES.get(slot, slot)}"


def _is_down_projection(module: Any, path: str) -> bool:
    return module is TurboLinear and path.endswith(("linear_q_down_proj", "linear_kv_down_proj"))
