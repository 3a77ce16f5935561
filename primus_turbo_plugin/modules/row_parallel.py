"""Row-parallel linear: Megatron's RowParallelLinear with the GEMMs, and the gradients, of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.modules.linear_base import TurboLinearMixin
from primus_turbo_plugin.modules.megatron_contract import check_keywords, tensor_parallel_group, without_apex
from primus_turbo_plugin.precision.module_plan import ModulePlan


class TurboRowParallelLinear(TurboLinearMixin, RowParallelLinear):
    """y = x @ w.T + b with the columns of w spread over the tensor-parallel ranks, and y summed over them.

    Args:
        input_size: K, of all ranks.
        output_size: N.
        config: Megatron's TransformerConfig. `gradient_accumulation_fusion` needs no Apex.
        init_method: Initialises the weight in place.
        input_is_parallel: x holds this rank's inputs already; otherwise they are cut out of it.
        plan: Precision and kernels; None for BF16.
        tp_group: Ranks; None takes that of `pg_collection` or Megatron's own.
        keywords: What newer Megatron releases pass, see `megatron_contract.INERT_KEYWORDS`.
        others: As Megatron's.

    Raises:
        ConfigError: An unknown keyword, or an expert's layer that is to add its bias: Megatron's experts add it after combining.
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
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
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
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            stride=stride,
            keep_master_weight_for_test=keep_master_weight_for_test,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            tp_group=tensor_parallel_group(tp_group, keywords, is_expert=is_expert),
        )
        self.config = config
        self.tp_comm_buffer_name = tp_comm_buffer_name
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        if self.explicit_expert_comm and not skip_bias_add:
            raise ConfigError(
                f"{where}: an expert's row-parallel layer under tensor or expert parallelism leaves its sum to the token "
                "dispatcher, so skip_bias_add must be True, got False."
            )
        self.setup_turbo(plan, in_features=input_size, out_features=output_size, split="in")

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """y = x @ w.T, summed over the ranks.

        Args:
            input_: [seq, batch, in / ranks], or [seq, batch, in] unless `input_is_parallel`.

        Returns:
            [seq, batch, out], this rank's part of the sequence with sequence parallelism; and the bias if `skip_bias_add`.
        """
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        parallel = self.tensor_parallel(
            "row",
            self.tp_group,
            sequence_parallel=self.sequence_parallel and not self.explicit_expert_comm,
            reduce=not self.explicit_expert_comm,
        )
        bias = None if self.skip_bias_add else self.bias
        y = self.run_linear(input_, self.weight, bias, parallel, fused=self.gradient_accumulation_fusion)
        return y, self.bias if self.skip_bias_add else None
