"""Column-parallel linear: Megatron's ColumnParallelLinear with the GEMMs, and the gradients, of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from primus_turbo_plugin.modules.linear_base import TurboLinearMixin
from primus_turbo_plugin.modules.megatron_contract import check_keywords, tensor_parallel_group, without_apex
from primus_turbo_plugin.precision.module_plan import ModulePlan


class TurboColumnParallelLinear(TurboLinearMixin, ColumnParallelLinear):
    """y = x @ w.T + b with the rows of w spread over the tensor-parallel ranks.

    Everything outside the GEMMs and their collectives is Megatron's own: initialisation, attributes of parameters, gathering
    of the output, checkpoint keys. See `functional/linear.py` for what runs.

    Args:
        input_size: K.
        output_size: N, of all ranks.
        config: Megatron's TransformerConfig. `gradient_accumulation_fusion` needs no Apex.
        init_method: Initialises the weight in place.
        plan: Precision and kernels; None for BF16.
        tp_group: Ranks; None takes that of `pg_collection` or Megatron's own.
        keywords: What newer Megatron releases pass, see `megatron_contract.INERT_KEYWORDS`.
        others: As Megatron's.

    Raises:
        ConfigError: An unknown keyword.
        UnsupportedError: A setting of Megatron's that is not implemented here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[..., Any],
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: Any = None,
        plan: ModulePlan | None = None,
        **keywords: Any,
    ) -> None:
        where = plan.path if plan and plan.path else type(self).__name__
        check_keywords(where, keywords)
        super().__init__(
            input_size,
            output_size,
            config=without_apex(config),
            init_method=init_method,
            bias=bias,
            gather_output=gather_output,
            stride=stride,
            keep_master_weight_for_test=keep_master_weight_for_test,
            skip_bias_add=skip_bias_add,
            skip_weight_param_allocation=skip_weight_param_allocation,
            embedding_activation_buffer=embedding_activation_buffer,
            grad_output_buffer=grad_output_buffer,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            disable_grad_reduce=disable_grad_reduce,
            tp_group=tensor_parallel_group(tp_group, keywords, is_expert=is_expert),
        )
        self.config = config
        self.tp_comm_buffer_name = tp_comm_buffer_name
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.setup_turbo(plan, in_features=input_size, out_features=output_size, split="out")

    def _forward_impl(
        self,
        input: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        gradient_accumulation_fusion: bool = False,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: int | None = None,
        tp_group: Any = None,
        gtp_remat_size: int = 1,
    ) -> Tensor:
        """Called by Megatron's forward, in place of its own autograd function.

        Args:
            input: [seq, batch, in]; this rank's part of the sequence with `sequence_parallel`.
            weight: [out / ranks, in], the module's or the caller's.
            bias: [out / ranks] or None.
            gradient_accumulation_fusion: dw goes to `weight.main_grad`.
            allreduce_dgrad: dx is summed over the ranks.
            sequence_parallel: The input is gathered, and dx reduce-scattered.
            grad_output_buffer: Where dy is left for a deferred dw of the output layer, up to `wgrad_deferral_limit` (0: all).
            wgrad_deferral_limit: See above.
            tp_group: The ranks.
            gtp_remat_size: Refused in the constructor unless 1.

        Returns:
            [seq, batch, out / ranks].
        """
        parallel = self.tensor_parallel("column", tp_group, sequence_parallel=sequence_parallel, reduce=allreduce_dgrad)

        def defer(dy: Tensor) -> bool:
            assert grad_output_buffer is not None
            if wgrad_deferral_limit and len(grad_output_buffer) >= wgrad_deferral_limit:
                return False
            grad_output_buffer.append(dy)
            return True

        deferring = grad_output_buffer is not None and weight.requires_grad
        return self.run_linear(
            input, weight, bias, parallel, fused=gradient_accumulation_fusion, defer=defer if deferring else None
        )
