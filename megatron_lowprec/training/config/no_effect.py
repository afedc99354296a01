"""Options that change no update of a run: records of changes and comparisons of runs leave them out, and only them."""

from __future__ import annotations

# Places, names, logs, speed, memory and layout. An update depends on some of these by its order of summation, or by
# the draws of a rank.
_NAMES = """
    config list_recipes explain_recipe device no_self_test
    fp8_param_gather fp8_sequence_parallel_gather no_lowprec_linears emulate native moe_grouped_gemm
    attention_backend deterministic_mode cuda_graph_impl
    micro_batch_size recompute_granularity recompute_gelu recompute_method recompute_num_layers
    max_skipped_steps exit_interval exit_duration_in_mins exit_signal_handler
    manual_gc manual_gc_interval no_manual_gc_eval profile profile_step_start profile_step_end
    tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size sequence_parallel
    use_distributed_optimizer overlap_grad_reduce overlap_param_gather distributed_backend distributed_timeout_minutes
    memory_plan memory_plan_gpus no_memory_check num_workers data_cache_path test_data_path
    save no_save save_interval keep_last async_save load ckpt_step no_save_optim no_load_optim no_load_rng
    eval_interval
    log_interval log_params_norm log_num_zeros_in_grad log_quantization_interval log_quantization_also
    capture_step capture_layers tensorboard_dir wandb_project wandb_entity wandb_exp_name
    wandb_save_dir
    override_opt_param_scheduler use_checkpoint_opt_param_scheduler
"""
NO_EFFECT = frozenset(_NAMES.split())
