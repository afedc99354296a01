"""Fields of Megatron-core's TransformerConfig that an import represents, ignores or refuses.

The tables have the fields of the supported releases. Another field of the installed release is refused off its default.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from megatron_lowprec.errors import UserError

RENAMED: Mapping[str, str] = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
"""Field -> option here. Megatron-LM's args have the field's name from release 0.16 on, the option's before."""

_REPRESENTED = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization
    layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias hidden_dropout attention_dropout
    init_method_std bf16 params_dtype num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_score_function moe_router_dtype moe_router_enable_expert_bias
"""
REPRESENTED = frozenset(_REPRESENTED.split())
"""Fields that options of a Config or the imported weights represent."""

REFUSED: Mapping[str, Any] = {
    "multi_latent_attention": False,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "rotary_interleaved": False,
    "mrope_section": None,
    "no_rope_freq": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_size": None,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "gated_linear_unit": False,  # args have swiglu instead
    "glu_linear_offset": 0.0,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    "activation_func_clamp_value": None,
    "use_te_activation_func": False,  # its GELU is the tanh form
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_input_jitter_eps": None,
    "moe_router_topk_limited_devices": None,
    "moe_expert_capacity_factor": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_token_dropping": False,
    "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None,
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "mtp_num_layers": None,
    "is_hybrid_model": False,
    "heterogeneous_block_specs": False,
    "moe_single_grouped_weight": False,  # other tensors in a checkpoint
    "moe_single_grouped_bias": False,
    "use_mup": False,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
}
"""Fields that change the function of a model, of all supported releases, with the only value that these layers have."""

_HARMLESS: Mapping[str, str] = {
    "the activation, of which args have flags": "activation_func",
    "layout over ranks": """
        tensor_model_parallel_size pipeline_model_parallel_comm_backend pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size sequence_parallel context_parallel_size hierarchical_context_parallel_sizes
        max_seqlen_per_dp_cp_rank hybrid_context_parallel expert_model_parallel_size expert_tensor_parallel_size
        moe_extended_tp cp_comm_type microbatch_group_size_per_vp_stage num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split mtp_standalone hetereogenous_dist_checkpoint
        tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
        expert_gtp_weight_remat_size
    """,
    "communication of ranks": """
        async_tensor_model_parallel_allreduce tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
        tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
        tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
        overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release variable_seq_lengths
        overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p overlap_p2p_comm_warmup_flush
        symmetric_ar_type nccl_all_reduce_for_prefill overlap_dispatch_backward_with_experts_wgrad
        high_priority_a2a_comm_stream
    """,
    "how tokens reach experts": """
        moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_permute_fusion_into_hybridep
        moe_shared_expert_overlap moe_grouped_gemm moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_pad_experts_for_cuda_graph_inference
        moe_per_layer_logging moe_layer_recompute moe_enable_routing_replay moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms moe_ncclep_static_shape moe_ncclep_zero_copy
    """,
    "precision, which a recipe sets anew": """
        fp16 enable_autocast autocast_dtype pipeline_dtype apply_query_key_layer_scaling attention_softmax_in_fp32
        disable_bf16_reduced_precision_matmul fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval
        fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention
        tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4 fp4_recipe
        fp4_param fp4_quantizer_factory use_kitchen use_kitchen_attention kitchen_attention_backend quant_recipe
        activation_func_fp8_input_store fp8_output_proj
    """,
    "kernels": """
        attention_backend transformer_impl bias_activation_fusion masked_softmax_fusion persist_layer_norm
        memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion use_fused_weighted_squared_relu
        fused_single_qkv_rope fused_residual_rmsnorm cross_entropy_loss_fusion cross_entropy_fusion_impl
        gradient_accumulation_fusion deterministic_mode batch_invariant_mode clone_scatter_output_in_embedding
        disable_parameter_transpose_cache mlp_chunks_for_prefill flash_attention_version use_transformer_engine_op_fuser
        use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert mlp_chunks_for_training
    """,
    "memory": """
        recompute_granularity recompute_method recompute_num_layers distribute_saved_activations recompute_modules
        num_microbatches_with_partial_activation_checkpoints deallocate_pipeline_outputs defer_embedding_wgrad_compute
        wgrad_deferral_limit cpu_offloading cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations
        cpu_offloading_weights cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size enable_cuda_graph
        cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps external_cuda_graph
        cuda_graph_impl cuda_graph_scope cuda_graph_modules moe_paged_stash moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
        fine_grained_offloading_max_inflight_offloads delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        activation_offload_fraction
    """,
    "inference": """
        flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
        inference_fuse_tp_communication inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_cuda_graph_scope inference_moe_token_dispatcher_type
    """,
    "initial weights": """
        perform_initialization use_cpu_initialization init_method output_layer_init_method embedding_init_method
        embedding_init_method_std init_model_with_meta_device use_te_rng_tracker
    """,
    "training": """
        calculate_per_token_loss moe_router_load_balancing_type moe_router_bias_update_rate moe_aux_loss_coeff
        moe_z_loss_coeff qk_clip qk_clip_alpha qk_clip_threshold
    """,
    "the program": """
        timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
        barrier_with_L1_time config_logger_dir test_mode log_max_attention_logit moe_grad_scale_func mtp_grad_scale_func
        experimental_attention_variant_loss_scale_func
    """,
    "no effect unless a refused field is set": """
        window_attn_skip_freq dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads moe_pad_expert_input_to_capacity moe_token_drop_policy
        mtp_loss_scaling_factor mtp_use_repeated_layer mtp_hybrid_override_pattern mamba_state_dim mamba_head_dim
        mamba_num_groups mamba_num_heads use_mamba_mem_eff_path mup_width_mult mup_base_hidden_size mup_base_head_dim
        mup_attn_scale_power dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_kernel_backend
        dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32 mtp_detach_heads moe_router_quantile_balancing_ema mamba_training_ssm_states_dtype
    """,
}
HARMLESS = frozenset(name for names in _HARMLESS.values() for name in names.split())
"""Fields that leave the function of a model as it is, up to rounding; above by what they are about."""

_ARGUMENTS: Mapping[str, Any] = {  # as REFUSED, of Megatron-LM's flags that are no fields
    "rotary_seq_len_interpolation_factor": None,
    "openai_gelu": False,
    "quick_geglu": False,
    "use_legacy_models": False,
    "retro_add_retriever": False,
    "yaml_cfg": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "hybrid_override_pattern": None,
    "hybrid_layer_pattern": None,
}
_SPECS = ("megatron_lowprec.specs", "megatron.core.models.gpt.gpt_layer_specs")


def check_fields(args: Namespace) -> None:
    """Reject Megatron-LM's args of a model that an import cannot represent.

    Raises:
        UserError: with the first such flag and its value.
    """
    from megatron.core.transformer import TransformerConfig

    classified = REPRESENTED | HARMLESS | REFUSED.keys()
    newer = {field.name: _default(field) for field in fields(TransformerConfig) if field.name not in classified}
    for name, allowed in {**REFUSED, **_ARGUMENTS, **newer}.items():
        found = getattr(args, name, allowed)
        if found != allowed and (found or allowed):  # None, False and 0 are all off
            raise refused(name, found)
    for routing in ("sinkhorn", "quantile_balancing"):  # other scores, other biases
        if routing in getattr(args, "moe_router_load_balancing_type", ()):  # one name or several
            raise refused("moe_router_load_balancing_type", routing)
    spec = getattr(args, "spec", None)
    if spec and spec[0] not in _SPECS:
        raise refused("spec", " ".join(map(str, spec)))


def refused(name: str, value: object) -> UserError:
    """The error about one of Megatron-LM's flags."""
    return UserError(
        f"the checkpoint's model has --{name.replace('_', '-')} {value}, which these layers do not have: it cannot be "
        "imported"
    )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
