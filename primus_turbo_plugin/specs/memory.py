"""What the linears of a Megatron model keep for backward, for the start-up report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from primus_turbo_plugin.diagnostics.activation_memory import Layout
from primus_turbo_plugin.diagnostics.expert_memory import ExpertSizes
from primus_turbo_plugin.diagnostics.memory_report import startup_rows
from primus_turbo_plugin.diagnostics.model_sizes import ModelSizes
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.specs import compat

_TOKENS_PER_RANK = 4096
"""Where the microbatch is not known: a multiple of every block, so that figures a token are exact."""


def memory_rows(config: Any, plans: Iterable[ModulePlan]) -> list[tuple[str, str]]:
    """Predicted figures of one rank and microbatch, experts evenly loaded; none for latent attention or latent experts.

    Args:
        config: A `TransformerConfig`.
        plans: Of the model's linears.
    """
    if config.multi_latent_attention or (config.num_moe_experts is not None and config.moe_latent_size is not None):
        return []
    tp = config.tensor_model_parallel_size
    tokens = _tokens(config)
    layout = Layout(
        tokens=_TOKENS_PER_RANK * tp if tokens is None else tokens,
        tp=tp,
        sequence_parallel=config.sequence_parallel,
    )
    rows = startup_rows(_sizes(config), layout, plans, per_token=tokens is None, experts=_experts(config))
    if rows and config.recompute_granularity is not None:
        rows.append(
            (
                "note",
                f"{config.recompute_granularity} recomputation: kept while a layer is computed again, or not recomputed",
            )
        )
    return rows


def _tokens(config: Any) -> int | None:
    """Tokens of a microbatch before tensor parallelism, where a training program runs that knows them."""
    args = compat.training_arguments()
    if args is None or getattr(args, "seq_length", None) is None or getattr(args, "micro_batch_size", None) is None:
        return None
    return int(args.seq_length * args.micro_batch_size // config.context_parallel_size)


def _sizes(config: Any) -> ModelSizes:
    return ModelSizes(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        gated=config.gated_linear_unit,
    )


def _experts(config: Any) -> ExpertSizes | None:
    if config.num_moe_experts is None:
        return None
    return ExpertSizes(
        experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        ffn=config.moe_ffn_hidden_size,
        shared_ffn=config.moe_shared_expert_intermediate_size or 0,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size or config.tensor_model_parallel_size,
        grouped=config.moe_grouped_gemm,
    )
