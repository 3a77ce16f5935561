"""Megatron-Core plugin for pretraining on AMD Instinct GPUs: layers, low-precision recipes and overlapped communication.

Importing the package imports neither torch nor Megatron: names below resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_LAZY = {
    "Recipe": "primus_turbo_plugin.precision.recipe",
    "TurboConfig": "primus_turbo_plugin.precision.config",
    "gpt_layer_spec": "primus_turbo_plugin.specs.gpt",
    "hybrid_stack_spec": "primus_turbo_plugin.specs.hybrid",
}

__all__ = ["Recipe", "TurboConfig", "__version__", "gpt_layer_spec", "hybrid_stack_spec"]

if TYPE_CHECKING:
    from primus_turbo_plugin.precision.config import TurboConfig
    from primus_turbo_plugin.precision.recipe import Recipe
    from primus_turbo_plugin.specs.gpt import gpt_layer_spec
    from primus_turbo_plugin.specs.hybrid import hybrid_stack_spec


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
