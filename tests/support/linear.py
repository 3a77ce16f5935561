"""What the tests of linears share: plans, calls, Megatron layers side by side with ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.functional.linear_call import LinearCall
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.recipe import Recipe

QUANTIZED_RECIPES = (
    "mxfp4",
    "mxfp4_all",
    "mxfp4_none",
    "mxfp8",
    "mxfp8_hybrid",
    "fp8_tensorwise",
    "fp8_rowwise",
    "fp8_block128",
)


def plan(recipe: str = "bf16", *, path: str = "", padding: Any = "pad", **overrides: Any) -> ModulePlan:
    """A plan with a preset and overrides: `plan("mxfp4", wgrad={"format": "bf16", "hadamard": 0})`."""
    precision = Recipe.preset(recipe, **overrides).linear(padding=padding, signs_seed=5, rounding_seed=7)
    return ModulePlan(path=path, precision=precision, recipe=recipe)


def make_call(of: ModulePlan, dtype: torch.dtype, *, fused: bool = False, **fields: Any) -> LinearCall:
    """A call for CPU tensors; `fused` writes dw to an fp32 sink."""
    kernels = LinearKernels.select(
        of, torch.device("cpu"), dtype, wgrad_dtype=torch.float32 if fused else dtype, accumulate=fused
    )
    return LinearCall(plan=of, kernels=kernels, **fields)


def leaf(t: Tensor, requires_grad: bool = True) -> Tensor:
    """A copy that autograd starts at."""
    return t.detach().clone().requires_grad_(requires_grad)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference|, in fp64."""
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-300))


def megatron_config(**fields: Any) -> Any:
    """A TransformerConfig for CPU; call inside `megatron_on_cpu()`."""
    from megatron.core.transformer import TransformerConfig

    defaults = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
    }
    return TransformerConfig(**{**defaults, **fields})


def start_megatron(*, tp: int = 1, seed: int = 1, **sizes: int) -> None:
    """Process groups and random states, in a process of a @ranks test."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, **sizes)
    model_parallel_cuda_manual_seed(seed)


def normal_(weight: Tensor) -> Tensor:
    """An init_method."""
    return torch.nn.init.normal_(weight, 0.0, 0.1)
