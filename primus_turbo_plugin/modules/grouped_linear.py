"""The linears of many experts as one: every expert's rows of x times that expert's weight, in one grouped GEMM.

One parameter holds the weights of all local experts, [experts, out, in], and one their biases, [experts, out]: all gradients
are accumulated by one GEMM into one `main_grad`. Initial values and the attributes that Megatron's optimizers, gradient
reductions and clipping read are those of Megatron's own expert linears, which are built, one at a time, to draw them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor
from torch.nn import Module, Parameter

from primus_turbo_plugin.communication.collectives import group_size
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.expert_bias import expert_bias_rows
from primus_turbo_plugin.functional.grouped_linear import grouped_linear
from primus_turbo_plugin.functional.grouped_linear_call import GroupedLinearCall
from primus_turbo_plugin.functional.grouped_linear_kernels import GroupedLinearKernels
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.modules.linear_base import TurboLinearMixin
from primus_turbo_plugin.modules.main_grad import MainGradSink, refuse_fsdp
from primus_turbo_plugin.modules.megatron_contract import check_keywords, without_apex
from primus_turbo_plugin.precision.module_plan import ModulePlan


class TurboGroupedLinear(TurboLinearMixin, Module):
    """y[t] = x[t] @ w[e].T for every token t of expert e, without any collective: the token dispatcher does those.

    Args:
        num_gemms: Local experts.
        input_size: K of one expert, of all ranks.
        output_size: N of one expert, of all ranks.
        split: What the ranks of `pg_collection.expt_tp` share: `out` (column parallel) or `in` (row parallel).
        config: Megatron's TransformerConfig. `gradient_accumulation_fusion` needs no Apex.
        init_method: Initialises one expert's weight [out, in] in place.
        bias: Whether there are biases.
        skip_bias_add: Return the biases, as [tokens, out], instead of adding them.
        is_expert: Refused unless True.
        tp_comm_buffer_name: fc1 or fc2, for messages.
        pg_collection: Megatron's process groups; None takes its own.
        stride: 2 where an expert's weight holds gate and up, each spread over the ranks.
        draw: Initialise now. False leaves it to calls of `draw_expert`.
        plan: Precision and kernels; None for BF16.
        keywords: What newer Megatron releases pass, see `megatron_contract.INERT_KEYWORDS`.

    Attributes:
        weight: [experts, out, in] of this rank.
        bias: [experts, out] of this rank, or None.

    Raises:
        ConfigError: An unknown keyword, or not an expert's layer.
        ShapeError: A size that needs padding which the plan refuses.
        UnsupportedError: A setting of Megatron's that is not implemented here.
    """

    kernel_choice = GroupedLinearKernels

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        split: Literal["in", "out"],
        config: Any,
        init_method: Callable[..., Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection: Any = None,
        stride: int = 1,
        draw: bool = True,
        plan: ModulePlan | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        where = plan.path if plan and plan.path else type(self).__name__
        check_keywords(where, keywords)
        if not is_expert:
            raise ConfigError(f"{where}: a grouped linear holds experts, got is_expert=False. Use a parallel linear.")
        self.config, self.num_gemms = config, num_gemms
        self.input_size, self.output_size, self.split, self.stride = input_size, output_size, split, stride
        self.skip_bias_add, self.tp_comm_buffer_name = skip_bias_add, tp_comm_buffer_name
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.tp_group, self.ep_group, self.expert_dp_group = groups.expt_tp, groups.ep, groups.expt_dp
        self._init_method, self._has_bias = init_method, bias
        self._allocate(self._one_expert(_draw_nothing))
        self.setup_turbo(plan, in_features=input_size, out_features=output_size, split=split)
        if draw:
            for expert in range(num_gemms):
                self.draw_expert(expert)

    def _one_expert(self, init_method: Callable[..., Any]) -> Any:
        """Megatron's linear of one expert, initialised: up to 0.18 it leaves some attributes out otherwise."""
        config = without_apex(self.config)
        if not config.perform_initialization:  # then there may be no random state of a device to draw with
            config.perform_initialization = config.use_cpu_initialization = True
        common = {
            "config": config,
            "init_method": init_method,
            "bias": self._has_bias,
            "skip_bias_add": True,
            "stride": self.stride,
            "is_expert": True,
            "tp_group": self.tp_group,
        }
        if self.split == "out":
            return ColumnParallelLinear(self.input_size, self.output_size, gather_output=False, **common)
        return RowParallelLinear(self.input_size, self.output_size, input_is_parallel=True, **common)

    def _allocate(self, like: Any) -> None:
        """Parameters for all experts, with the attributes that one expert's have."""
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        for name in ("weight", "bias"):
            one = getattr(like, name)
            if one is None:
                self.register_parameter(name, None)
                continue
            every = Parameter(torch.empty(self.num_gemms, *one.shape, dtype=one.dtype, device=device))
            vars(every).update(vars(one))
            # Megatron's row-parallel linear marks its bias so under sequence parallelism, and its gradient is then summed over
            # ranks that hold other experts. A routed expert's tokens were gathered by the dispatcher: nothing is left to sum.
            every.sequence_parallel = False
            # Up to 0.18 the norm of all gradients leaves out what is not so marked on all but the first tensor-parallel rank.
            every.tensor_model_parallel = getattr(one, "tensor_model_parallel", False) or group_size(self.tp_group) == 1
            if getattr(one, "partition_dim", -1) >= 0:
                every.partition_dim = one.partition_dim + 1
            self.register_parameter(name, every)

    @torch.no_grad()
    def draw_expert(self, expert: int) -> None:
        """Initial values of one expert, with the random numbers that Megatron's linear of that expert draws."""
        if not self.config.perform_initialization:
            return
        drawn = self._one_expert(self._init_method)
        self.weight[expert].copy_(drawn.weight)
        if self.bias is not None:
            self.bias[expert].copy_(drawn.bias)

    def forward(self, x: Tensor, tokens_per_expert: Tensor | list[int] | Groups) -> tuple[Tensor, Tensor | None]:
        """y = x @ w.T (+ b), each expert's rows with its own.

        Args:
            x: [tokens, in] of this rank, expert after expert.
            tokens_per_expert: [experts] on any device, zeros allowed; or the `Groups` made of them.

        Returns:
            [tokens, out], and the biases as [tokens, out] if `skip_bias_add` and there are any.

        Raises:
            ShapeError: The counts don't fit the experts or the tokens.
        """
        groups = tokens_per_expert
        if not isinstance(groups, Groups):
            groups = Groups.of(torch.as_tensor(groups), x.shape[0], x.device)
        refuse_fsdp(self.weight, self.path)
        added = None if self.skip_bias_add else self.bias
        y = grouped_linear(x, self.weight, groups, self._call(x), added)
        self._first_microbatch = False
        if self.bias is None or not self.skip_bias_add:
            return y, None
        return y, expert_bias_rows(self.bias.to(y.dtype), groups)

    def _call(self, x: Tensor) -> GroupedLinearCall:
        sink = MainGradSink(self.weight, self.path) if self.gradient_accumulation_fusion else None
        return GroupedLinearCall(
            plan=self.plan,
            kernels=self._select_kernels(x, self.weight, fused=sink is not None),
            sink=sink,
            delay=partial(self._delay, self.weight, sink) if self.config.delay_wgrad_compute else None,
            cache=self._cache_of(self.weight),
            transpose_weight=self.training,
            rounding=self._draw_rounding(),
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_gemms} experts, in_features={self.input_size}, out_features={self.output_size}, "
            f"bias={self.bias is not None}, split={self.split}"
        )


def _draw_nothing(weight: Tensor) -> Tensor:
    """An init_method that leaves values, and random states, as they are."""
    return weight


class TurboColumnParallelGroupedLinear(TurboGroupedLinear):
    """Each rank holds some of every expert's outputs. Arguments as `TurboGroupedLinear`'s."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **keywords: Any) -> None:
        super().__init__(num_gemms, input_size, output_size, split="out", **keywords)


class TurboRowParallelGroupedLinear(TurboGroupedLinear):
    """Each rank holds some of every expert's inputs; the dispatcher sums their outputs. Arguments as `TurboGroupedLinear`'s."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **keywords: Any) -> None:
        super().__init__(num_gemms, input_size, output_size, split="in", **keywords)
