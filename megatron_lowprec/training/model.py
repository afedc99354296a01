"""Config -> Megatron-core's model chunks, optimizer and scheduler, wired as Megatron-LM wires them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule

from megatron_lowprec.mcore.runtime import RecipeRuntime, bind_recipe
from megatron_lowprec.mcore.spec import gpt_block_spec
from megatron_lowprec.recipe.schema import Recipe
from megatron_lowprec.training.config import Config
from megatron_lowprec.training.resolve import virtual_stages
from megatron_lowprec.training.schedule import Schedule
from megatron_lowprec.training.shapes import sized


@dataclass
class Trainer:
    """What a training step works on: the chunks of this pipeline stage, and what belongs to them."""

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    runtime: RecipeRuntime
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build(config: Config, recipe: Recipe, schedule: Schedule, padded_vocab_size: int) -> Trainer:
    """Model, recipe, data parallelism, optimizer and scheduler; every rank calls it, with the process groups there."""
    transformer = transformer_config(config)
    bare = _gpt_chunks(config, transformer, padded_vocab_size)
    runtime = bind_recipe(
        bare,
        recipe,
        num_layers=sized(config.num_layers),
        seed=config.seed,
        accumulate_wgrad=not config.no_gradient_accumulation_fusion,
        cache_weights=get_num_microbatches() > 1,
    )
    chunks = _data_parallel(config, transformer, bare)
    optimizer = _optimizer(config, chunks)
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = finalize_model_grads
    return Trainer(transformer, chunks, runtime, optimizer, _scheduler(schedule, optimizer))


def transformer_config(config: Config) -> TransformerConfig:
    """Megatron-core's description of the model; sizes, numerics and parallelism."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    with_gelu_bias = not (config.swiglu or config.squared_relu or config.disable_bias_linear or config.num_experts)
    on_gpu = torch.cuda.is_available()
    virtual = virtual_stages(config)
    return TransformerConfig(
        num_layers=sized(config.num_layers),
        hidden_size=sized(config.hidden_size),
        ffn_hidden_size=sized(config.ffn_hidden_size),
        num_attention_heads=sized(config.num_attention_heads),
        num_query_groups=config.num_query_groups,
        kv_channels=sized(config.kv_channels),
        normalization=config.normalization,
        layernorm_epsilon=config.norm_epsilon,
        gated_linear_unit=config.swiglu,
        activation_func=F.silu if config.swiglu else squared_relu if config.squared_relu else F.gelu,
        add_bias_linear=not config.disable_bias_linear,
        add_qkv_bias=config.add_qkv_bias,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        init_method_std=config.init_method_std,
        bf16=config.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Without it the draws depend on the tensor-parallel size; with it experts repeat on expert-parallel ranks.
        use_cpu_initialization=config.use_cpu_initialization or (not on_gpu and config.expert_model_parallel_size == 1),
        # Its fused bias + GELU is the tanh approximation that GPT-2 uses, so CPU and GPU must agree on it. There is no
        # fused form for experts, and none without a bias.
        bias_activation_fusion=with_gelu_bias or config.swiglu,
        bias_dropout_fusion=True,
        cross_entropy_loss_fusion=on_gpu,
        # These two need apex or TE; our linears add into main_grad themselves.
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        deterministic_mode=config.deterministic_mode,
        recompute_granularity=config.recompute_granularity,
        recompute_method=config.recompute_method,
        recompute_num_layers=config.recompute_num_layers,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=1 if config.num_experts and config.expert_model_parallel_size > 1 else None,
        sequence_parallel=config.sequence_parallel,
        # An interleaved pipeline without these two trains on wrong activations, silently.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        num_moe_experts=config.num_experts,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_router_topk=config.moe_router_topk,
        moe_router_load_balancing_type=config.moe_router_load_balancing_type,
        moe_aux_loss_coeff=config.moe_aux_loss_coeff,
        moe_z_loss_coeff=config.moe_z_loss_coeff,
        moe_token_dispatcher_type=config.moe_token_dispatcher_type,
        moe_permute_fusion=False,
    )


def _gpt_chunks(config: Config, transformer: TransformerConfig, padded_vocab_size: int) -> list[MegatronModule]:
    """The chunks of this pipeline stage, one without interleaving, on this rank's device."""
    virtual = virtual_stages(config)
    chunks: list[MegatronModule] = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual is not None else None
        chunk: MegatronModule = GPTModel(
            transformer,
            gpt_block_spec(
                transformer,
                attention_backend=config.attention_backend,
                stock_linears=config.stock_linears,
                vp_stage=vp_stage,
            ),
            vocab_size=padded_vocab_size,
            max_sequence_length=sized(config.max_position_embeddings),
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            vp_stage=vp_stage,
        )
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        chunks.append(Float16Module(transformer, chunk) if config.bf16 else chunk)
    return chunks


def _data_parallel(
    config: Config, transformer: TransformerConfig, bare: list[MegatronModule]
) -> list[DistributedDataParallel]:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.bf16 and not config.grad_reduce_in_bf16,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        use_distributed_optimizer=config.use_distributed_optimizer,
        bucket_size=max(40_000_000, 1_000_000 * mpu.get_data_parallel_world_size())
        if config.overlap_grad_reduce
        else None,
    )
    # Only the first chunk's gradients wait for the whole backward; buckets of the others would never fill in time.
    chunks = [DistributedDataParallel(transformer, ddp, c, disable_bucketing=i > 0) for i, c in enumerate(bare)]
    for chunk in chunks:
        chunk.broadcast_params()
    if config.overlap_grad_reduce:
        _overlap(transformer, chunks, config.overlap_param_gather)
    return chunks


def _overlap(transformer: TransformerConfig, chunks: list[DistributedDataParallel], gather: bool) -> None:
    """Tell the schedules when to hold back and when to start the collectives; one function, or one a chunk."""
    several = len(chunks) > 1
    transformer.no_sync_func = [c.no_sync for c in chunks] if several else chunks[0].no_sync
    transformer.grad_sync_func = [c.start_grad_sync for c in chunks] if several else chunks[0].start_grad_sync
    if gather:
        transformer.param_sync_func = [c.start_param_sync for c in chunks] if several else chunks[0].start_param_sync


def _optimizer(config: Config, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    options = OptimizerConfig(
        optimizer=config.optimizer,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
        log_num_zeros_in_grad=config.log_num_zeros_in_grad,
    )
    optimizer = get_megatron_optimizer(options, chunks, use_gloo_process_groups=False)
    for inner in torch_optimizers(optimizer):
        if type(inner) is torch.optim.AdamW:
            # Without TE or apex Megatron-core takes torch's AdamW as it comes, tensor by tensor.
            for group in [inner.defaults, *inner.param_groups]:
                group["fused"], group["foreach"] = True, False
    return optimizer


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers inside Megatron-core's, one for dense and one for expert weights."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]


def _scheduler(schedule: Schedule, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.init_lr,
        max_lr=schedule.max_lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_samples,
        lr_decay_steps=schedule.decay_samples,
        lr_decay_style=schedule.decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=schedule.decay_samples,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=schedule.wsd_decay_samples,
        lr_wsd_decay_style=schedule.wsd_decay_style,
    )


@torch.no_grad()
def optimizer_step(optimizer: MegatronOptimizer) -> tuple[bool, float | None, int | None]:
    """One update, and (whether it happened, gradient norm before clipping, gradient values that are zero).

    As Megatron-core's ``ChainedOptimizer.step``, which notices a gradient that is not finite by its loss scaler alone;
    bf16 has none, so the norm decides here, and weights and moments stay as they are.
    """
    if optimizer.prepare_grads():
        return False, None, None
    norm = optimizer.get_grad_norm()
    if norm is not None and not math.isfinite(norm):
        return False, norm, None
    for part in optimizer.chained_optimizers:
        parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm)
    zeros = optimizer.count_zeros() if optimizer.config.log_num_zeros_in_grad else None
    return optimizer.step_with_ready_grads(), norm, zeros


@contextmanager
def gathered(trainer: Trainer, config: Config) -> Iterator[None]:
    """All weights up to date on every rank: with --overlap-param-gather the last update is still to be gathered."""
    if not config.overlap_param_gather:
        yield
        return
    for chunk in trainer.chunks:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in trainer.chunks:
            chunk.enable_forward_pre_hook()
