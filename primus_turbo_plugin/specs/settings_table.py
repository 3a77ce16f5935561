"""What becomes of every field of Megatron's `TransformerConfig`, as data; docs/megatron-settings.md prints it.

Four treatments:

- honoured: this package's modules or spec do what the field says;
- translated: the field becomes a setting of `TurboConfig` (`settings.resolve`);
- refused: a value other than the harmless ones is an error that names the field, where this package provides the component;
- untouched: nothing this package replaces reads it, so Megatron treats it as always (`untouched_fields`).

Fields of all supported releases are listed; a test compares with the installed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primus_turbo_plugin.specs.untouched_fields import UNTOUCHED

#: Providers that honour what is refused otherwise.
_ENGINE = ("transformer_engine",)
#: Providers of experts in one grouped GEMM, whose weights and biases are one parameter in any case.
_GROUPED = ("turbo", "transformer_engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A field that cannot be honoured.

    Attributes:
        why: What is missing, in words a user understands.
        remedy: What to do.
        component: The component whose provider decides (linear, norm, attention); empty: refused whatever is chosen.
        unless: Providers of that component that honour the field.
        harmless: Values that ask for nothing.
    """

    why: str
    remedy: str
    component: str = ""
    unless: tuple[str, ...] = _ENGINE
    harmless: tuple[Any, ...] = (None, False)


def _linear(why: str, remedy: str, **kwargs: Any) -> Refusal:
    return Refusal(why=why, remedy=remedy, component="linear", **kwargs)


def _attention(why: str, remedy: str, **kwargs: Any) -> Refusal:
    return Refusal(why=why, remedy=remedy, component="attention", **kwargs)


_BY_TURBO = "choose the precision with PRIMUS_TURBO_CONFIG or --turbo-precision instead"
_INFERENCE = "this package trains; serve the model with another spec"

REFUSED: Mapping[str, Refusal] = {
    # Overlap of tensor-parallel communication
    "tp_comm_overlap": _linear(
        "Megatron's own linears do not overlap their collectives",
        "set 'linear: turbo', or leave --tp-comm-overlap out",
        unless=("turbo", "transformer_engine"),
    ),
    "overlap_dispatch_backward_with_experts_wgrad": _linear(
        "it delays the wgrad of Transformer Engine's grouped experts", "use --delay-wgrad-compute alone"
    ),
    "symmetric_ar_type": _linear("symmetric-memory all-reduce is for inference", "leave --symmetric-ar-type out"),
    # Precision
    "fp8_param": _linear("weights are kept in their own dtype, with quantised copies", "leave --fp8-param-gather out"),
    "fp4_param": _linear("weights are kept in their own dtype, with quantised copies", "leave --fp4-param-gather out"),
    "fp8_output_proj": _linear("the output layer stays in its own dtype", "leave --fp8-output-proj out"),
    "disable_parameter_transpose_cache": _linear("it frees a cache of Transformer Engine", "leave it out"),
    "quant_recipe": _linear(
        "recipes by module come from TurboConfig", "write them under 'modules:' in PRIMUS_TURBO_CONFIG"
    ),
    "use_kitchen": Refusal(why="Kitchen replaces the same linears", remedy=_BY_TURBO),
    "use_kitchen_attention": Refusal(
        why="Kitchen replaces the same attention", remedy="set 'attention: megatron' or turbo"
    ),
    "fp8_multi_head_attention": _attention(
        "the linears around attention hand it tensors, not FP8 codes",
        "set fp8_dot_product_attention, or attention_precision: fp8 in PRIMUS_TURBO_CONFIG, which quantise inside",
    ),
    # Kernels of Transformer Engine that Megatron reaches through its own spec
    "use_te_activation_func": _linear(
        "the activation module is Transformer Engine's", "leave --use-te-activation-func out"
    ),
    "use_transformer_engine_op_fuser": Refusal(
        why="it replaces the whole MLP by Transformer Engine's", remedy="leave --use-transformer-engine-op-fuser out"
    ),
    "use_grouped_gemm_for_dense_mlp": Refusal(why="there is no grouped GEMM for a dense MLP", remedy="leave it out"),
    "use_grouped_gemm_for_shared_expert": Refusal(
        why="there is no grouped GEMM for shared experts", remedy="leave it out"
    ),
    "moe_grouped_gemm": _linear(
        "Megatron's local experts have no grouped GEMM and would ignore the flag",
        "set 'linear: turbo', or leave --moe-grouped-gemm out: the experts then run one after the other",
        unless=_GROUPED,
    ),
    "moe_single_grouped_weight": _linear(
        "Megatron's local experts have a weight each", "set 'linear: turbo', or leave it out", unless=_GROUPED
    ),
    "moe_single_grouped_bias": _linear(
        "Megatron's local experts have a bias each", "set 'linear: turbo', or leave it out", unless=_GROUPED
    ),
    "moe_mlp_glu_interleave_size": _linear(
        "the experts' gate and up projections are kept apart", "leave --moe-mlp-glu-interleave-size out"
    ),
    "moe_paged_stash": _linear(
        "it stashes the activations of Transformer Engine's fused experts", "leave --moe-paged-stash out"
    ),
    "moe_use_legacy_grouped_gemm": Refusal(
        why="the legacy grouped experts bypass every linear of a spec", remedy="leave --moe-use-legacy-grouped-gemm out"
    ),
    "mla_down_proj_fusion": Refusal(why="the down projections of q and kv are two linears here", remedy="leave it out"),
    # Sharding and placement of weights
    "gtp_weight_remat_size": _linear(
        "weights sharded beyond tensor parallelism exist only in Transformer Engine's linears",
        "set --tensor-parallel-num-weight-shards to the tensor-parallel size",
        harmless=(1, None),
    ),
    "expert_gtp_weight_remat_size": _linear(
        "weights sharded beyond tensor parallelism exist only in Transformer Engine's linears",
        "set --expert-tensor-parallel-num-weight-shards to the expert tensor-parallel size",
        harmless=(1, None),
    ),
    "init_model_with_meta_device": _linear("the modules allocate their weights when built", "leave it out"),
    "cpu_offloading": _linear("activations are not offloaded", "leave --cpu-offloading-num-layers out"),
    "fine_grained_activation_offloading": _linear(
        "offloading is untested with quantised activations", "leave --fine-grained-activation-offloading out"
    ),
    # Numerics
    "batch_invariant_mode": Refusal(
        why="the kernels are not batch-invariant", remedy="leave --batch-invariant-mode out"
    ),
    "qk_clip": _attention("core attention does not record the largest logit", "leave --qk-clip out"),
    "log_max_attention_logit": _attention("core attention does not record the largest logit", "leave it out"),
    "memory_efficient_layer_norm": Refusal(
        why="the norms keep their input for the backward pass",
        remedy="leave it out, or set 'norm: megatron'",
        component="norm",
        unless=("megatron", "transformer_engine"),
    ),
    "fused_residual_rmsnorm": Refusal(
        why="Megatron's norms do not return the residual",
        remedy="leave --fused-residual-rmsnorm out, or set 'norm: turbo'",
        component="norm",
        unless=("turbo", "transformer_engine"),
    ),
    # Attention
    "flash_attention_version": _attention("it chooses among Transformer Engine's kernels", "leave it out"),
    "hybrid_context_parallel": _attention("context parallelism has one size for all samples", "leave it out"),
    "experimental_attention_variant": Refusal(
        why="only softmax attention and MLA have a spec here", remedy="leave --experimental-attention-variant out"
    ),
    # Models
    "heterogeneous_block_specs": Refusal(
        why="layers of different widths have no spec here", remedy="leave --heterogeneous-layers-config-path out"
    ),
    # Inference
    "flash_decode": Refusal(why="it is for inference", remedy=_INFERENCE),
    "cache_mla_latents": Refusal(why="it is for inference", remedy=_INFERENCE),
    "use_inference_optimized_layers": Refusal(why="it is for inference", remedy=_INFERENCE),
    "inference_fuse_tp_communication": Refusal(why="it is for inference", remedy=_INFERENCE),
}

#: Decided by code in `settings.py`, because more than one field counts.
CONDITIONAL: Mapping[str, str] = {
    "fp8": "translated by `fp8_recipe`; needs 'linear: turbo' or transformer_engine, no precision in TurboConfig, no recompute "
    "other than selective core_attn",
    "fp8_recipe": "tensorwise -> fp8_tensorwise, mxfp8 -> mxfp8, blockwise -> fp8_block128; delayed and custom refused. "
    "With `fp8='hybrid'` gradients are E5M2",
    "fp8_wgrad": "False -> wgrad in BF16",
    "fp8_quantizer_factory": "refused with `fp8_recipe='custom'`",
    "fp8_margin": "refused if set with `fp8`: only delayed scaling reads it",
    "fp8_interval": "refused if set with `fp8`: only delayed scaling reads it",
    "fp8_amax_history_len": "refused if set with `fp8`: only delayed scaling reads it",
    "fp8_amax_compute_algo": "refused if set with `fp8`: only delayed scaling reads it",
    "tp_only_amax_red": "refused if set with `fp8`: over which ranks an amax is taken is not a choice here",
    "fp4": "`fp4_recipe='mxfp4'` -> mxfp4 (MTP layers stay in BF16, as in Megatron); nvfp4 and custom refused",
    "fp4_recipe": "see `fp4`",
    "fp4_quantizer_factory": "refused with `fp4_recipe='custom'`",
    "fp8_dot_product_attention": "-> attention_precision: fp8; refused with 'attention: megatron'",
    "first_last_layers_bf16": "-> bf16_first_layers, bf16_last_layers",
    "num_layers_at_start_in_bf16": "-> bf16_first_layers, where `first_last_layers_bf16` is set",
    "num_layers_at_end_in_bf16": "-> bf16_last_layers, where `first_last_layers_bf16` is set",
    "cuda_graph_impl": "a quantised weight is quantised inside the graph, in every microbatch; refused with stochastic rounding, "
    "with `fp8` and `fp4` (name the recipe by --turbo-precision), and beside overlap but with 'transport: sdma'; "
    "transformer_engine also where that is not installed",
    "enable_cuda_graph": "as `cuda_graph_impl`",
    "external_cuda_graph": "as `cuda_graph_impl`",
    "attention_backend": "auto; local needs 'attention: megatron', the others 'attention: transformer_engine'",
    "transformer_impl": "local or transformer_engine, without effect on this spec; inference_optimized refused",
    "delay_wgrad_compute": "honoured by linears of turbo and transformer_engine (`backward_dw`); refused with 'linear: megatron' "
    "and, by turbo, in CUDA graphs of layers",
    "cp_comm_type": "p2p (also where it is not given), all_gather, a2a and a2a+p2p honoured by core attention, for all layers or "
    "one a layer; docs/context-parallel.md. A list is refused on 0.16, which hands each layer its neighbour's entry",
    "hierarchical_context_parallel_sizes": "[a2a size, p2p size], honoured by core attention under `cp_comm_type` a2a+p2p",
    "recompute_modules": "honoured. With `layernorm`, as with `fused_residual_rmsnorm`, norms are not fused into the linears "
    "behind them, since Megatron can do this only with norms that stand alone. layernorm and mla_up_proj are refused "
    "without Transformer Engine, whose functions Megatron calls for them; moe_act is this package's own with `moe_grouped_gemm`",
    "recompute_granularity": "honoured; see `fp8`",
    "q_lora_rank": "honoured; without it queries have no norm, also with `qk_layernorm`",
    "fp32_residual_connection": "refused with 'linear: turbo' or megatron under bf16 or fp16 without autocast: norms would "
    "hand fp32 to weights of another dtype",
    "moe_latent_size": "experts honour it. The projections around them are Transformer Engine's linears in any case, in BF16 "
    "whatever `precision` says: Megatron asks for it",
    "mtp_num_layers": "honoured through `gpt_mtp_spec`; refused with the --spec flag, which Megatron-LM ignores for MTP",
    "context_parallel_size": "honoured by core attention; refused with 'attention: megatron', which cannot do it",
    "sequence_parallel": "honoured; with 'norm: megatron' refused where Apex is missing (torch's norm)",
    "multi_latent_attention": "honoured; refused with 'attention: megatron', which cannot do it, and on 0.16 without Transformer "
    "Engine, where Megatron takes its absence for its presence",
}

HONOURED: Mapping[str, str] = {
    "tp_comm_overlap_ag": "-> communication.gather, where overlap is on (docs/communication.md)",
    "tp_comm_overlap_rs": "-> communication.scatter, where overlap is on",
    "tp_comm_bulk_dgrad": "-> communication.bulk_gather, where overlap is on",
    "tp_comm_bulk_wgrad": "-> communication.bulk_scatter, where overlap is on",
    "tp_comm_overlap_rs_dgrad": "-> communication.scatter_dgrad, where overlap is on",
    "tp_comm_overlap_disable_qkv": "-> communication.except_for, where overlap is on",
    "tp_comm_overlap_disable_fc1": "-> communication.except_for, where overlap is on",
    "tp_comm_split_ag": "names an algorithm; chunks are chosen by measured costs",
    "tp_comm_split_rs": "names an algorithm; chunks are chosen by measured costs",
    "tp_comm_atomic_ag": "names an algorithm; chunks are chosen by measured costs",
    "tp_comm_atomic_rs": "names an algorithm; chunks are chosen by measured costs",
    "tensor_model_parallel_size": "weights sharded as Megatron shards them",
    "pipeline_model_parallel_size": "each stage gets its own layers, with global numbers",
    "virtual_pipeline_model_parallel_size": "each model chunk gets its own layers",
    "expert_model_parallel_size": "tokens are dispatched by Megatron, to experts of this package's linears",
    "expert_tensor_parallel_size": "experts' linears shard over the expert group",
    "num_layers_in_first_pipeline_stage": "uneven stages",
    "num_layers_in_last_pipeline_stage": "uneven stages",
    "pipeline_model_parallel_layout": "any layout",
    "account_for_embedding_in_pipeline_split": "the stage has one layer less",
    "account_for_loss_in_pipeline_split": "the stage has one layer less",
    "num_layers": "",
    "hidden_size": "",
    "num_attention_heads": "",
    "num_query_groups": "grouped queries",
    "kv_channels": "",
    "ffn_hidden_size": "",
    "params_dtype": "dtype of new parameters",
    "perform_initialization": "",
    "use_cpu_initialization": "the same weights as Megatron's for the same seed",
    "enable_autocast": "GEMMs compute in autocast's dtype",
    "init_method": "passed to each linear",
    "output_layer_init_method": "passed to each linear",
    "deterministic_mode": "every kernel here gives the same bits in every run, with it or without",
    "gradient_accumulation_fusion": "wgrad accumulates into fp32 `main_grad`; no Apex needed",
    "normalization": "LayerNorm and RMSNorm",
    "layernorm_epsilon": "",
    "layernorm_zero_centered_gamma": "",
    "persist_layer_norm": "names a kernel of Apex; the norms have one, with the same result",
    "masked_softmax_fusion": "names a kernel of Megatron's attention; the result is the same",
    "add_bias_linear": "",
    "add_qkv_bias": "",
    "gated_linear_unit": "fc1 holds gate and up, sharded and checkpointed as Megatron's",
    "qk_layernorm": "norms of queries and keys; of MLA's latents",
    "qk_l2_norm": "Megatron's L2Norm",
    "attention_dropout": "the probability is; the positions are drawn by a counter, not as Megatron draws them",
    "softmax_scale": "",
    "apply_query_key_layer_scaling": "",
    "attention_softmax_in_fp32": "softmax is always computed in fp32",
    "window_size": "sliding window",
    "window_attn_skip_freq": "which layers have the window",
    "softmax_type": "",
    "num_moe_experts": "Megatron's MoELayer, router and dispatchers; experts of this package's linears: all local ones in "
    "grouped GEMMs with `moe_grouped_gemm` (TurboGroupedMLP), else one after the other (SequentialMLP)",
    "moe_layer_freq": "a frequency or a pattern",
    "moe_ffn_hidden_size": "",
    "moe_shared_expert_intermediate_size": "Megatron's SharedExpertMLP with this package's linears",
    "kv_lora_rank": "",
    "qk_head_dim": "",
    "qk_pos_emb_head_dim": "",
    "v_head_dim": "",
    "mtp_use_repeated_layer": "one layer for all depths",
}


def known_fields() -> frozenset[str]:
    """Every field this package has decided about."""
    untouched = [name for names in UNTOUCHED.values() for name in names]
    return frozenset([*REFUSED, *CONDITIONAL, *HONOURED, *untouched])
