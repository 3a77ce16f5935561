"""Norm and column-parallel linear in one module, with the parameters and checkpoint keys of Transformer Engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.fused_quantize import rms_norm_input
from primus_turbo_plugin.functional.linear_call import LinearCall, TensorParallel
from primus_turbo_plugin.functional.norm import NormChoice, layer_norm
from primus_turbo_plugin.modules.column_parallel import TurboColumnParallelLinear
from primus_turbo_plugin.precision.module_plan import ModulePlan


class TurboLayerNormColumnParallelLinear(TurboColumnParallelLinear):
    """y = norm(x) @ w.T + b, the norm (`config.normalization`) before the gathering of a sequence-parallel input.

    Parameters, in this order: `layer_norm_weight` [in] (ones, or zeros when `layernorm_zero_centered_gamma`),
    `layer_norm_bias` [in] (layer norm only), `weight`, `bias`. Checkpoints of Megatron's local spec have a module of its own
    for the norm; its `sharded_state_dict_keys_map` gives it these names.

    Args:
        input_size: K, also the norm's width.
        output_size: N, of all ranks.
        config: Megatron's TransformerConfig.
        init_method: Initialises the weight in place.
        plan: Precision and kernels; None for BF16.
        others: As `TurboColumnParallelLinear`'s.

    Raises:
        ConfigError: A norm other than LayerNorm and RMSNorm, an expert's layer, or one whose weight is passed to forward.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[..., Any],
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        plan: ModulePlan | None = None,
        **others: Any,
    ) -> None:
        where = plan.path if plan and plan.path else type(self).__name__
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ConfigError(f"{where}: normalization must be LayerNorm or RMSNorm, got {config.normalization!r}.")
        if is_expert or skip_weight_param_allocation:
            raise ConfigError(
                f"{where}: needs is_expert=False and skip_weight_param_allocation=False, got {is_expert} and "
                f"{skip_weight_param_allocation}. Use a norm and a TurboColumnParallelLinear."
            )
        super().__init__(
            input_size, output_size, config=config, init_method=init_method, is_expert=False, plan=plan, **others
        )
        self._zero_centered_gamma = config.layernorm_zero_centered_gamma
        self._norm_kernels = NormChoice(self.plan.kernels.get("norm"))
        gamma = torch.zeros if self._zero_centered_gamma else torch.ones
        place = {"dtype": config.params_dtype, "device": self.weight.device}
        self.layer_norm_weight = self._norm_parameter(gamma(input_size, **place))
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = self._norm_parameter(torch.zeros(input_size, **place))
        else:
            self.register_parameter("layer_norm_bias", None)
        for name in ("weight", "bias"):  # norm first, as in Transformer Engine: DDP's buffers follow this order
            self._parameters[name] = self._parameters.pop(name)

    def _norm_parameter(self, value: Tensor) -> Parameter:
        """A parameter that every rank holds. Its gradients are partial under sequence parallelism: marked, Megatron sums them."""
        parameter = Parameter(value)
        parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """y = norm(x) @ w.T + b.

        Args:
            input_: [seq, batch, in]; this rank's part of the sequence with sequence parallelism.
            weight: Used instead of the module's.
            runtime_gather_output: Overrides `gather_output`.

        Returns:
            [seq, batch, out / ranks] ([seq, batch, out] if gathered), and the bias if `skip_bias_add`, else None.
        """
        return super().forward(input_, weight, runtime_gather_output)

    def run_linear(
        self, x: Tensor, weight: Any, bias: Tensor | None, parallel: TensorParallel, **options: Any
    ) -> Tensor:
        """The linear of norm(x): where x is quantised, the norm is computed in the kernel that quantises."""
        return super().run_linear(x, weight, bias, parallel, front=self._norm, **options)

    def _norm(self, x: Tensor, weight: Any, call: LinearCall) -> tuple[Tensor, LinearCall]:
        """norm(x) of x [tokens, in], as `run_linear`'s `front`."""
        eps, kernels = self.config.layernorm_epsilon, self._norm_kernels
        gamma, zero_centered = self.layer_norm_weight, self._zero_centered_gamma
        if self.config.normalization == "LayerNorm":
            normed = layer_norm(x, gamma, self.layer_norm_bias, eps, zero_centered_gamma=zero_centered, kernels=kernels)
            return normed, call
        with_wgrad = torch.is_grad_enabled() and weight.requires_grad
        return rms_norm_input(
            x, gamma, eps, call, zero_centered_gamma=zero_centered, with_wgrad=with_wgrad, kernels=kernels
        )
