"""Layers whose spec is made when Megatron builds them, because only then is it known which layer it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank


class LayerOnDemand:
    """Builds the layer that `make(config, index)` specifies; what comes out is that layer, never an instance of this class.

    Megatron's hybrid stack has one spec for all layers of a kind, and `--spec` before 0.19 one object for all model chunks;
    a layer's plan, however, depends on its number.

    Args:
        make: (config, global number from 0) -> spec of the layer.
        config: The layer's `TransformerConfig`.
        layer_number: As Megatron passes it: from 1, within the stage or over the whole model.
        **kwargs: Passed on to the layer.
    """

    def __new__(cls, *, make: Callable[[Any, int], Any], config: Any, layer_number: int, **kwargs: Any) -> Any:
        index = global_layer_index(config, layer_number, kwargs)
        return build_module(make(config, index), config=config, layer_number=layer_number, **kwargs)


def on_demand(make: Callable[[Any, int], Any]) -> ModuleSpec:
    """The spec of a `LayerOnDemand`."""
    return ModuleSpec(module=LayerOnDemand, params={"make": make})


def global_layer_index(config: Any, layer_number: int, kwargs: dict[str, Any]) -> int:
    """The layer's number over the whole model, from 0, as the layer itself will compute it.

    A caller that numbers layers over the whole model says so: `add_layer_offset=False` to layers that would add the stage's
    offset, `pp_layer_offset` to Mamba layers, which never do.
    """
    if kwargs.get("add_layer_offset") is False or "pp_layer_offset" in kwargs:
        return layer_number - 1
    rank = get_pg_rank(kwargs["pg_collection"].pp)
    return layer_number - 1 + get_transformer_layer_offset(config, kwargs.get("vp_stage"), rank)
