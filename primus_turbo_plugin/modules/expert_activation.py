"""What stands between the two linears of an expert: its activation function, times the router's probabilities.

The formulas, the order of roundings and the choice of Megatron's fused functions are those of Megatron's experts, so that the
same settings give the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl
from torch import Tensor

from primus_turbo_plugin.errors import UnsupportedError

_FUSED = "bias_activation_fusion of experts"


def check_activation(where: str, config: Any) -> None:
    """Refuses at construction what Megatron's experts would refuse, or ignore, in their first forward.

    Raises:
        UnsupportedError: Names the setting and the remedy.
    """
    if config.bias_activation_fusion:
        fuses = config.gated_linear_unit and config.activation_func in (torch.nn.functional.silu, quick_gelu)
        if not fuses:
            raise UnsupportedError(
                f"{where}: {_FUSED}: Megatron fuses SwiGLU and quick GeGLU only, got {_name(config.activation_func)}"
                f"{'' if config.gated_linear_unit else ' without a gate'}. Leave bias_activation_fusion off."
            )
        clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
        if config.activation_func is not quick_gelu and (clamp is not None or offset):
            raise UnsupportedError(
                f"{where}: {_FUSED}: Megatron's fused SwiGLU neither clamps nor adds an offset, got "
                f"activation_func_clamp_value={clamp} and glu_linear_offset={offset}. Leave bias_activation_fusion off."
            )
    if getattr(config, "moe_mlp_glu_interleave_size", None) is not None:
        raise UnsupportedError(
            f"{where}: moe_mlp_glu_interleave_size={config.moe_mlp_glu_interleave_size}: gate and up projections are kept "
            "apart here. Leave it out."
        )


def activate(config: Any, x: Tensor, probs: Tensor) -> Tensor:
    """act(x) * probs, in x's dtype.

    Args:
        config: Megatron's TransformerConfig.
        x: [tokens, ffn], or [tokens, 2 * ffn] of a gated unit: gate, then up. Its bias is added already.
        probs: [tokens, 1] of any floating dtype, the router's.

    Returns:
        [tokens, ffn].
    """
    if config.bias_activation_fusion:
        return _fused(config, x, probs)
    fused_relu = config.use_fused_weighted_squared_relu and not config.gated_linear_unit
    if fused_relu and config.activation_func is squared_relu:
        y: Tensor = weighted_squared_relu_impl(x, probs)
        return y
    weighted = _gated(config, x) if config.gated_linear_unit else config.activation_func(x)
    return (weighted * probs).to(x.dtype)


def _fused(config: Any, x: Tensor, probs: Tensor) -> Tensor:
    stored_in_fp8 = config.activation_func_fp8_input_store
    if config.activation_func is quick_gelu:
        bounds = (config.glu_linear_offset, config.activation_func_clamp_value)
        y: Tensor = weighted_bias_quick_geglu_impl(x, None, probs, stored_in_fp8, *bounds)
    else:
        y = weighted_bias_swiglu_impl(x, None, probs, stored_in_fp8)
    return y


def _gated(config: Any, x: Tensor) -> Tensor:
    gate, up = torch.chunk(x, 2, dim=-1)
    limit = config.activation_func_clamp_value
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    activated: Tensor = config.activation_func(gate) * (up + config.glu_linear_offset)
    return activated


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))
