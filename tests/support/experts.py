"""What the tests of experts share: the same experts as one module and one by one, with the same weights, on the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.precision.module_plan import ModulePlan
from tests.support.linear import megatron_config

HIDDEN, FFN = 32, 48


def experts_config(**fields: Any) -> Any:
    """A TransformerConfig of a mixture of four experts; call inside `megatron_on_cpu()`."""
    defaults: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": 2,
        "expert_tensor_parallel_size": 1,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "moe_grouped_gemm": True,
    }
    return megatron_config(**{**defaults, **fields})


def grouped(config: Any, plan: ModulePlan | None = None, experts: int = 4, groups: Any = None) -> Any:
    """A TurboGroupedMLP, both linears with `plan`."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from primus_turbo_plugin.modules import (
        TurboColumnParallelGroupedLinear,
        TurboGroupedMLP,
        TurboRowParallelGroupedLinear,
    )

    kinds = (TurboColumnParallelGroupedLinear, TurboRowParallelGroupedLinear)
    slots = [ModuleSpec(module=kind, params={"plan": plan}) for kind in kinds]
    return TurboGroupedMLP(experts, config, MLPSubmodules(linear_fc1=slots[0], linear_fc2=slots[1]), groups)


def sequential(config: Any, plan: ModulePlan | None = None, experts: int = 4, *, turbo: bool = False) -> Any:
    """Megatron's SequentialMLP, of Megatron's linears or (`turbo`) of this package's."""
    from functools import partial

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from primus_turbo_plugin.modules import TurboColumnParallelLinear, TurboRowParallelLinear

    kinds: list[Any] = [ColumnParallelLinear, RowParallelLinear]
    if turbo:
        kinds = [partial(TurboColumnParallelLinear, plan=plan), partial(TurboRowParallelLinear, plan=plan)]
    submodules = MLPSubmodules(linear_fc1=_slot(kinds[0]), linear_fc2=_slot(kinds[1]))
    return SequentialMLP(experts, config, submodules, get_default_pg_collection())


def _slot(kind: Any) -> Any:
    """What either release of Megatron builds from."""
    from functools import partial

    from megatron.core.transformer.spec_utils import ModuleSpec

    return ModuleSpec(module=kind.func, params=kind.keywords) if isinstance(kind, partial) else kind


def copy_weights(one: Any, every: Any) -> None:
    """Gives grouped experts the weights of a SequentialMLP."""
    with torch.no_grad():
        for index, expert in enumerate(one.local_experts):
            for name in ("linear_fc1", "linear_fc2"):
                theirs, ours = getattr(expert, name), getattr(every, name)
                ours.weight[index].copy_(theirs.weight)
                if theirs.bias is not None:
                    ours.bias[index].copy_(theirs.bias)


def stacked_gradients(one: Any) -> dict[str, Tensor | None]:
    """Gradients of a SequentialMLP by the names that grouped experts have: all experts stacked."""
    found: dict[str, Tensor | None] = {}
    for name in ("linear_fc1", "linear_fc2"):
        for kind in ("weight", "bias"):
            parameters = [getattr(getattr(expert, name), kind) for expert in one.local_experts]
            if parameters[0] is not None:
                missing = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
                found[f"{name}.{kind}"] = torch.stack(missing)
    return found


def run(experts: Any, x: Tensor, probs: Tensor, counts: list[int], dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dprobs; gradients of the weights stay in the experts."""
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y, bias = experts(x, torch.tensor(counts), probs)
    assert bias is None
    y.backward(dy)
    assert x.grad is not None
    assert probs.grad is not None
    return y.detach(), x.grad, probs.grad
