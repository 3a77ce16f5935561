"""torch.nn modules with Megatron's constructor, forward and checkpoint contracts.

Names resolve on first use, so that a module can be imported without those it does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "TurboColumnParallelGroupedLinear": "grouped_linear",
    "TurboColumnParallelLinear": "column_parallel",
    "TurboDotProductAttention": "attention",
    "TurboGroupedMLP": "experts",
    "TurboLayerNormColumnParallelLinear": "layernorm_column",
    "TurboLinear": "linear",
    "TurboNorm": "norm",
    "TurboRowParallelGroupedLinear": "grouped_linear",
    "TurboRowParallelLinear": "row_parallel",
}

__all__ = [
    "TurboColumnParallelGroupedLinear",
    "TurboColumnParallelLinear",
    "TurboDotProductAttention",
    "TurboGroupedMLP",
    "TurboLayerNormColumnParallelLinear",
    "TurboLinear",
    "TurboNorm",
    "TurboRowParallelGroupedLinear",
    "TurboRowParallelLinear",
]

if TYPE_CHECKING:
    from primus_turbo_plugin.modules.attention import TurboDotProductAttention
    from primus_turbo_plugin.modules.column_parallel import TurboColumnParallelLinear
    from primus_turbo_plugin.modules.experts import TurboGroupedMLP
    from primus_turbo_plugin.modules.grouped_linear import (
        TurboColumnParallelGroupedLinear,
        TurboRowParallelGroupedLinear,
    )
    from primus_turbo_plugin.modules.layernorm_column import TurboLayerNormColumnParallelLinear
    from primus_turbo_plugin.modules.linear import TurboLinear
    from primus_turbo_plugin.modules.norm import TurboNorm
    from primus_turbo_plugin.modules.row_parallel import TurboRowParallelLinear


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
