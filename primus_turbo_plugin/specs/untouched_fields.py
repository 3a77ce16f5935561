"""Fields of Megatron's `TransformerConfig` that nothing in this package reads or replaces, and why, as data."""

from __future__ import annotations

from collections.abc import Mapping


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Why -> fields.
UNTOUCHED: Mapping[str, tuple[str, ...]] = {
    "Optimizer, schedule and data-parallel hooks": _names(
        """
        timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func
        no_sync_func grad_sync_func param_sync_func num_microbatches_with_partial_activation_checkpoints
        barrier_with_L1_time calculate_per_token_loss fp16 bf16 autocast_dtype use_te_rng_tracker test_mode
        config_logger_dir
        """
    ),
    "Pipeline communication": _names(
        """
        pipeline_model_parallel_comm_backend pipeline_dtype variable_seq_lengths overlap_p2p_comm
        batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
        overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage mtp_standalone
        max_seqlen_per_dp_cp_rank
        """
    ),
    "Sub-flags that Megatron reads only where their main flag, refused or translated above, is set": _names(
        """
        tp_comm_bootstrap_backend qk_clip_alpha qk_clip_threshold
        kitchen_attention_backend tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
        offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks activation_offload_fraction
        fine_grained_offloading_max_inflight_offloads moe_shared_expert_glu_interleave_size
        nccl_all_reduce_for_prefill cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps cuda_graph_modules cuda_graph_scope
        """
    ),
    "Embedding, output layer and loss, which no spec replaces": _names(
        """
        cross_entropy_loss_fusion cross_entropy_fusion_impl defer_embedding_wgrad_compute
        wgrad_deferral_limit embedding_init_method embedding_init_method_std
        clone_scatter_output_in_embedding mtp_loss_scaling_factor mtp_detach_heads
        mtp_hybrid_override_pattern use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult
        mup_output_mult mup_base_head_dim mup_attn_scale_power init_method_std
        """
    ),
    "Positions: applied by Megatron before core attention": _names(
        """
        rotary_interleaved apply_rope_fusion fused_single_qkv_rope no_rope_freq mrope_section rope_type
        rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast
        beta_slow mscale mscale_all_dim
        """
    ),
    "Residual stream, dropout and activation: Megatron's own code between the modules": _names(
        """
        hidden_dropout apply_residual_connection_post_layernorm bias_dropout_fusion
        bias_activation_fusion activation_func activation_func_fp8_input_store activation_func_clamp_value
        glu_linear_offset use_fused_weighted_squared_relu attention_output_gate
        disable_bf16_reduced_precision_matmul mlp_chunks_for_prefill mlp_chunks_for_training
        """
    ),
    "Recomputation of whole layers, and sub-flags of offloading (refused)": _names(
        """
        recompute_method recompute_num_layers distribute_saved_activations moe_layer_recompute
        cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
        """
    ),
    "Router, dispatcher and expert-parallel schedule": _names(
        """
        overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream
        moe_shared_expert_gate moe_shared_expert_overlap moe_router_load_balancing_type moe_router_topk
        moe_enable_routing_replay moe_router_topk_limited_devices moe_router_padding_for_quantization
        moe_router_padding_for_fp8 moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_quantile_balancing_ema
        moe_router_force_load_balancing moe_router_force_biased moe_aux_loss_coeff moe_z_loss_coeff
        moe_input_jitter_eps moe_token_dropping moe_token_dispatcher_type moe_enable_deepep
        moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs
        moe_per_layer_logging moe_expert_capacity_factor moe_pad_expert_input_to_capacity
        moe_pad_experts_for_cuda_graph_inference moe_token_drop_policy moe_permute_fusion moe_router_fusion
        moe_apply_probs_on_input moe_flex_dispatcher_num_sms moe_deepep_num_sms
        moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_expert_rank_capacity_factor moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu moe_extended_tp
        """
    ),
    "Attention variants that are refused (`experimental_attention_variant`)": _names(
        """
        experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim
        dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
        linear_value_head_dim linear_num_key_heads linear_num_value_heads
        """
    ),
    "Hybrid models": _names(
        """
        is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
        mamba_training_ssm_states_dtype use_mamba_mem_eff_path hetereogenous_dist_checkpoint
        """
    ),
    "Inference": _names(
        """
        inference_rng_tracker inference_sampling_seed inference_disable_triton_nvls_kernels
        inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type inference_cuda_graph_scope
        """
    ),
    "Without effect in Megatron itself": _names("async_tensor_model_parallel_allreduce"),
}
