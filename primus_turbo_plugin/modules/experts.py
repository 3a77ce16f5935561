"""The routed experts of a mixture-of-experts layer as two grouped GEMMs.

h[t] = x[t] @ w1[e].T (+ b1[e])      for every token t that was sent to local expert e, tokens lying expert after expert
a[t] = act(h[t]) * p[t]              p the router's probability
y[t] = a[t] @ w2[e].T (+ b2[e] p[t])

Where Megatron's `moe_apply_probs_on_input` is set, p multiplies x instead. No collective: Megatron's dispatchers bring the tokens
and take them back, and sum over expert-tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from primus_turbo_plugin.communication.collectives import group_size
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.modules.expert_activation import activate, check_activation
from primus_turbo_plugin.modules.experts_checkpoint import ExpertPlace, gather_experts, sharded_linear

_LINEARS = ("linear_fc1", "linear_fc2")


class TurboGroupedMLP(MegatronModule):
    """What SequentialMLP computes, all local experts at once. Its place in a model, its constructor and its checkpoints are those
    of Megatron's experts.

    Args:
        num_local_experts: Experts of this rank.
        config: Megatron's TransformerConfig.
        submodules: `linear_fc1` and `linear_fc2`, grouped linears (`modules/grouped_linear.py`) or specs of them.
        pg_collection: Megatron's process groups; None takes its own.
        name: The module's path, from 0.17 on; the linears know theirs from their plans.

    Raises:
        ConfigError: `moe_apply_probs_on_input` with more than one expert a token.
        UnsupportedError: An activation that Megatron's experts would refuse in their first forward.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        where = name or type(self).__name__
        check_activation(where, config)
        if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
            raise ConfigError(
                f"{where}: moe_apply_probs_on_input needs moe_router_topk=1, got {config.moe_router_topk}. Leave it out."
            )
        width = config.hidden_size if config.moe_latent_size is None else config.moe_latent_size
        inner = config.moe_ffn_hidden_size
        gates = 2 if config.gated_linear_unit else 1
        common = {
            "config": config,
            "bias": config.add_bias_linear,
            "is_expert": True,
            "pg_collection": groups,
            "draw": False,
        }
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            num_local_experts,
            width,
            gates * inner,
            init_method=config.init_method,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            stride=gates,
            **common,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            num_local_experts,
            inner,
            width,
            init_method=config.output_layer_init_method,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )
        for expert in range(num_local_experts):  # the order in which SequentialMLP draws
            self.linear_fc1.draw_expert(expert)
            self.linear_fc2.draw_expert(expert)
        self._recomputes_activation = config.recompute_granularity == "selective" and "moe_act" in (
            config.recompute_modules or ()
        )

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """The experts' outputs.

        Args:
            permuted_local_hidden_states: [tokens, hidden], expert after expert.
            tokens_per_expert: [local experts], on any device.
            permuted_probs: [tokens].

        Returns:
            [tokens, hidden], biases and probabilities included; and None, where other modules return a bias.
        """
        x, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            x, probs = (probs * x).to(x.dtype), torch.ones_like(probs)
        groups = Groups.of(torch.as_tensor(tokens_per_expert), x.shape[0], x.device)
        h, _ = self.linear_fc1(x, groups)
        if self._recomputes_activation and torch.is_grad_enabled():
            y, bias = self._recompute_between(h, probs, groups)
        else:
            y, bias = self.linear_fc2(activate(self.config, h, probs), groups)
        return y if bias is None else (y + bias * probs).to(y.dtype), None

    def _recompute_between(self, h: Tensor, probs: Tensor, groups: Groups) -> tuple[Tensor, Tensor | None]:
        """fc2 of the activation, which is not kept: backward makes it again, for itself and for fc2's wgrad.

        A quantised fc2 keeps its own copy and never asks.
        """
        a: Tensor = checkpoint(activate, self.config, h, probs, use_reentrant=False, preserve_rng_state=False)
        discarded, kept = (a.data_ptr(), a.shape, a.stride()), (h.detach(), probs.detach())

        def pack(t: Tensor) -> Tensor | None:
            return None if (t.data_ptr(), t.shape, t.stride()) == discarded else t

        def unpack(t: Tensor | None) -> Tensor:
            if t is not None:
                return t
            with torch.no_grad():
                return activate(self.config, *kept)

        with saved_tensors_hooks(pack, unpack):
            y, bias = self.linear_fc2(a, groups)
        return y, bias

    def backward_dw(self) -> None:
        """Computes the weight gradients that backward left (`config.delay_wgrad_compute`)."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Keys and slices of SequentialMLP, see `experts_checkpoint`."""
        place = ExpertPlace(
            num_local=self.num_local_experts,
            ep_rank=self.ep_group.rank(),
            ep_size=group_size(self.ep_group),
            tp_rank=self.tp_group.rank(),
            tp_size=group_size(self.tp_group),
            dp_rank=self.dp_group.rank(),
            apart=bool((metadata or {}).get("singleton_local_shards", False)),
        )
        sharded: dict[str, Any] = {}
        for name in _LINEARS:
            gated = name == "linear_fc1" and self.config.gated_linear_unit
            sharded |= sharded_linear(getattr(self, name), name, prefix, sharded_offsets, place, gated=gated)
        return sharded

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        gather_experts(state_dict, prefix, _LINEARS, self.num_local_experts)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
