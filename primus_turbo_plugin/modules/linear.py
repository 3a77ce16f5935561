"""A linear whose weight every tensor-parallel rank holds whole, as Transformer Engine's `duplicated` linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor
from torch.nn import Module, Parameter

from primus_turbo_plugin.communication.collectives import group_size
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.linear_call import TensorParallel
from primus_turbo_plugin.modules.linear_base import TurboLinearMixin
from primus_turbo_plugin.modules.megatron_contract import check_keywords
from primus_turbo_plugin.precision.module_plan import ModulePlan


class TurboLinear(TurboLinearMixin, Module):
    """y = x @ w.T + b without any collective: the down projections of multi-latent attention.

    With sequence parallelism each rank multiplies its own tokens, so the gradients of w and b are partial: both are marked
    `sequence_parallel`, and Megatron sums them over the ranks at the end of the step.

    Args:
        input_size: K.
        output_size: N.
        config: Megatron's TransformerConfig.
        init_method: Initialises the weight in place.
        bias: Whether there is a bias.
        skip_bias_add: Return the bias instead of adding it.
        parallel_mode: `duplicated`; the other two have classes of their own.
        gather_output: Ignored unless True, which is refused: the output is whole.
        is_expert: Refused unless False.
        skip_weight_param_allocation: Refused unless False.
        tp_comm_buffer_name: Not used.
        tp_group: Only names the ranks on which the checkpoint holds one copy; None takes Megatron's own.
        plan: Precision and kernels; None for BF16.
        keywords: What newer Megatron releases pass, see `megatron_contract`.

    Raises:
        ConfigError: An unknown keyword, or an argument that does not fit a duplicated linear.
        UnsupportedError: A setting of Megatron's that is not implemented here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[..., Any],
        bias: bool,
        skip_bias_add: bool,
        parallel_mode: str = "duplicated",
        gather_output: bool = False,
        is_expert: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        plan: ModulePlan | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        where = plan.path if plan and plan.path else type(self).__name__
        check_keywords(where, keywords)
        if (parallel_mode, gather_output, is_expert, skip_weight_param_allocation) != (
            "duplicated",
            False,
            False,
            False,
        ):
            raise ConfigError(
                f"{where}: TurboLinear is duplicated on every rank and has its own weight; got parallel_mode={parallel_mode!r}, "
                f"gather_output={gather_output}, is_expert={is_expert}, "
                f"skip_weight_param_allocation={skip_weight_param_allocation}. "
                "Use TurboColumnParallelLinear or TurboRowParallelLinear."
            )
        self.config, self.input_size, self.output_size = config, input_size, output_size
        self.skip_bias_add = skip_bias_add
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self._tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        self._initialize_weight(init_method)
        if bias:
            self.bias = Parameter(torch.zeros(output_size, dtype=config.params_dtype, device=device))
        else:
            self.register_parameter("bias", None)
        for parameter in self.parameters():
            parameter.allreduce = True
            parameter.sequence_parallel = config.sequence_parallel
            parameter.tensor_model_parallel = False
        self._register_load_state_dict_pre_hook(_default_extra_state)
        self.setup_turbo(plan, in_features=input_size, out_features=output_size, split=None)
        self._refuse_diverging_copies()

    def _refuse_diverging_copies(self) -> None:
        """Ranks that compute the same gradient must round it alike, and they draw different random bits."""
        ranks = group_size(self._tp_group)
        if self.plan.precision.is_stochastic and ranks > 1 and not self.config.sequence_parallel:
            raise ConfigError(
                f"{self.path}: recipe '{self.plan.recipe}' rounds stochastically, but {ranks} tensor-parallel ranks hold this "
                "layer's weight whole and would round its gradient differently, so that their copies drift apart. "
                f"Turn sequence parallelism on, or set 'rounding: nearest' for this module: modules: {{{self.path!r}: ...}}."
            )

    def _initialize_weight(self, init_method: Callable[..., Any]) -> None:
        """The same on every tensor-parallel rank: on a device from the generator they share."""
        if not self.config.perform_initialization:
            return
        if self.config.use_cpu_initialization:
            n, k = self.weight.shape
            _initialize_affine_weight_cpu(
                self.weight,
                n,
                k,
                n,
                0,
                init_method,
                params_dtype=self.config.params_dtype,
                rank=0,
                world_size=1,
                skip_set_tensor_parallel_attributes=True,
            )
            return
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """y = x @ w.T + b.

        Args:
            x: [seq, batch, in], whatever part of the sequence this rank holds.

        Returns:
            [seq, batch, out], and the bias if `skip_bias_add`, else None.
        """
        bias = None if self.skip_bias_add else self.bias
        y = self.run_linear(x, self.weight, bias, TensorParallel(), fused=self.gradient_accumulation_fusion)
        return y, self.bias if self.skip_bias_add else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One copy for all tensor- and data-parallel ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            None,
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def get_extra_state(self) -> None:
        """There is none; the key exists for checkpoints of Transformer Engine's modules."""

    def set_extra_state(self, state: Any) -> None:
        """Whatever another backend wrote is of no use here."""

    def extra_repr(self) -> str:
        return f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, TP=1"


def _default_extra_state(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets a checkpoint without `_extra_state` load."""
    state_dict.setdefault(f"{prefix}_extra_state", None)
