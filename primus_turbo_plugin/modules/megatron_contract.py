"""What Megatron hands to the constructor of a linear, and what of it is refused by name rather than ignored."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.precision.module_plan import ModulePlan

#: Keywords of newer releases (or of Transformer Engine's classes) that need nothing done: what they are.
INERT_KEYWORDS: Mapping[str, str] = {
    "name": "the module's path, from 0.17 on; a turbo module knows it from its plan",
    "pg_collection": "process groups; used where tp_group is not given",
}

#: Keywords that are inert only when None.
REFUSED_KEYWORDS: Mapping[str, str] = {
    "gtp_remat_group": "generalised tensor parallelism (weight rematerialisation) is not implemented. Run with GTP off",
    "symmetric_ar_type": "symmetric-memory all-reduce is not implemented. Leave symmetric_ar_type unset",
}

_REFUSED_SETTINGS: Mapping[str, str] = {
    "fp8": "the module was given no plan that answers it. Build it from gpt_layer_spec(config, turbo), or leave fp8 unset",
    "fp4": "the module was given no plan that answers it. Build it from gpt_layer_spec(config, turbo), or leave fp4 unset",
    "tp_comm_overlap": "the module has no plan that answers it. Build it from gpt_layer_spec(config, turbo), or leave it off",
    "cpu_offloading": "offloading of activations is not implemented in turbo linears. Leave it off",
    "symmetric_ar_type": REFUSED_KEYWORDS["symmetric_ar_type"],
}


def check_keywords(where: str, keywords: Mapping[str, Any]) -> None:
    """Accepts what newer Megatron releases pass, and nothing else.

    Raises:
        UnsupportedError: A keyword of `REFUSED_KEYWORDS` has a value.
        ConfigError: A keyword is unknown.
    """
    for key, value in keywords.items():
        if key in REFUSED_KEYWORDS:
            if value is not None:
                raise UnsupportedError(f"{where}: {key}={value!r}: {REFUSED_KEYWORDS[key]}.")
        elif key not in INERT_KEYWORDS:
            known = ", ".join(sorted({*INERT_KEYWORDS, *REFUSED_KEYWORDS}))
            raise ConfigError(
                f"{where}: unknown keyword {key!r} (value {value!r}). Beside Megatron's own arguments the following are known: "
                f"{known}. This megatron-core release may be newer than the plugin supports."
            )


def tensor_parallel_group(tp_group: Any, keywords: Mapping[str, Any], *, is_expert: bool) -> Any:
    """The group given, or the one of `pg_collection`; None leaves the choice to Megatron."""
    collection = keywords.get("pg_collection")
    if tp_group is not None or collection is None:
        return tp_group
    return collection.expt_tp if is_expert else collection.tp


def check_settings(where: str, config: Any, plan: ModulePlan | None, *, tensor_parallel: bool) -> None:
    """Refuses settings of Megatron's that a turbo linear would otherwise pass over.

    Args:
        where: The module.
        config: Megatron's TransformerConfig.
        plan: The module's plan; None when it was built without one, so that nobody has weighed `config.fp8` and `fp4` yet.
        tensor_parallel: Whether the layer is split over more than one rank.

    Raises:
        UnsupportedError: Names the setting, its value and the remedy.
    """
    for name, why in _REFUSED_SETTINGS.items():
        value = getattr(config, name, None)  # a bare ModelParallelConfig has not all of them
        weighed = plan is not None and name in ("fp8", "fp4", "tp_comm_overlap")
        weighed = weighed or (name == "tp_comm_overlap" and not tensor_parallel)
        if value and not weighed:
            raise UnsupportedError(f"{where}: {name}={value!r}: {why}.")


def without_apex(config: Any) -> Any:
    """The config for Megatron's constructors, which refuse gradient_accumulation_fusion without Apex; ours does without it."""
    config = copy.copy(config)
    config.gradient_accumulation_fusion = False
    return config
