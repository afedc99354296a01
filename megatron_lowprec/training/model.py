"""Builds Megatron-core's model chunks, optimizer and scheduler from a config, wired as in Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_te_version

from megatron_lowprec.comm.gradients import GradientFactor, rounded_sum_warnings
from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.dispatch import have_triton
from megatron_lowprec.kernels.fp8_accumulate import cublaslt
from megatron_lowprec.linear.backends.table import emulated_rows
from megatron_lowprec.mcore.graphs.layer_graphs import LayerGraphs
from megatron_lowprec.mcore.layers.gpt_model import LowPrecGPTModel
from megatron_lowprec.mcore.layers.router import LossTokens, weigh_aux_losses
from megatron_lowprec.mcore.optim.fp8_param_gather import use_primary_weights
from megatron_lowprec.mcore.optim.recipe_optimizer import build_optimizer, torch_optimizers
from megatron_lowprec.mcore.optim.vocabulary_grad import accumulate_vocabulary_gradients
from megatron_lowprec.mcore.runtime import RecipeRuntime, bind_recipe
from megatron_lowprec.mcore.te.te_layers import TERuntime, accumulate_wgrad, check_support
from megatron_lowprec.recipe.explain import describe_training_state
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.te.te_config import TEConfig, te_config
from megatron_lowprec.training.config.options import OPTIONS, Config
from megatron_lowprec.training.config.resolve import microbatches_of, virtual_stages
from megatron_lowprec.training.distributed.rank_sync import lines_of_ranks, run_on_all_ranks
from megatron_lowprec.training.flash_attention import use_flash_attention
from megatron_lowprec.training.models.architectures import architecture_of
from megatron_lowprec.training.models.common import rope
from megatron_lowprec.training.options.recipe_options import RecipeOptions
from megatron_lowprec.training.options.training_options import ParallelOptions
from megatron_lowprec.training.schedule import Schedule

Runtime = RecipeRuntime | TERuntime


@dataclass
class Model:
    """The chunks of this pipeline stage under a recipe, for forward passes."""

    config: TransformerConfig
    chunks: Sequence[torch.nn.Module]
    runtime: Runtime


@dataclass
class Trainer(Model):
    """A model with its optimizer and scheduler, for training steps; ``inner`` is a row of ``OPTIMIZERS``."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    graphs: LayerGraphs | None = None
    gradient_factor: GradientFactor | None = None
    loss_tokens: LossTokens | None = None
    inner: str = "adam"

    def enter_phase(self, iteration: int) -> list[str]:
        """``RecipeRuntime.enter_phase``; CUDA graphs are captured anew behind the next step."""
        if not isinstance(self.runtime, RecipeRuntime):
            return []
        changed = self.runtime.enter_phase(iteration)
        if changed and self.graphs is not None:
            self.graphs.recapture()
        return changed

    def fit_histories(self) -> bool:
        """``RecipeRuntime.fit_histories``."""
        return isinstance(self.runtime, RecipeRuntime) and self.runtime.fit_histories()


def build(config: Config, recipe: Recipe, schedule: Schedule, padded_vocab_size: int) -> Trainer:
    """Model, recipe, data parallelism, optimizer and scheduler; collective call after the process groups are set up."""
    model = build_model(config, recipe, padded_vocab_size)
    transformer = model.config
    if config.fp8_param_gather and isinstance(model.runtime, RecipeRuntime):
        count = use_primary_weights(model.chunks, reduce_amax=not config.no_amax_reduce)
        model.runtime.notes.append(f"--fp8-param-gather: {count} weights on this stage are FP8, without a bf16 copy")
    if isinstance(model.runtime, RecipeRuntime):
        model.runtime.notes += describe_training_state(recipe)
        model.runtime.notes += rounded_sum_warnings(recipe.gradients, mpu.get_data_parallel_world_size())
        accumulates = not (config.no_lowprec_linears or config.no_gradient_accumulation_fusion)
        if torch.cuda.is_available() and accumulates:
            model.runtime.notes += lines_of_ranks(accumulate_vocabulary_gradients(model.chunks))  # of all stages
    loss_tokens = weigh_aux_losses(model.chunks) if config.calculate_per_token_loss else None
    chunks = _data_parallel(config, bool(config.fp8_param_gather), transformer, list(model.chunks))
    optimizer, factor = build_optimizer(
        chunks,
        recipe,
        _optimizer_config(config, schedule, transformer),
        seed=config.seed,
        inner=config.optimizer,
        inner_options=_inner_options(config),
    )
    try:
        cublaslt.enable(bool(config.fp8_accumulate_wgrad))
    except RuntimeError as error:
        raise UserError(f"--fp8-accumulate-wgrad: {error}") from None
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = finalize_model_grads
    graphs = None
    if config.cuda_graph_impl == "local" and isinstance(model.runtime, RecipeRuntime):
        graphs = LayerGraphs(chunks[0])
        model.runtime.notes.append("--cuda-graph-impl local: behind the first step layers are captured in CUDA graphs")
    scheduler = _scheduler(schedule, optimizer)
    rest = graphs, factor, loss_tokens, config.optimizer
    return Trainer(transformer, chunks, model.runtime, optimizer, scheduler, *rest)


def build_model(config: Config, recipe: Recipe, padded_vocab_size: int) -> Model:
    """The model and its recipe, without gradients or optimizer; a collective call."""
    te = te_config(recipe) if config.transformer_impl == "transformer_engine" else None
    if te is not None and te.kind is not None:
        check_support(te.kind)
    transformer = transformer_config(config, te)
    if config.flash_attention_version is not None:  # before minutes of a large model's construction
        chosen = config.flash_attention_version, transformer.attention_dropout, transformer.kv_channels
        run_on_all_ranks(lambda: use_flash_attention(*chosen))
    chunks = _gpt_chunks(config, transformer, padded_vocab_size)
    if te is None:
        runtime = bind(config, recipe, chunks)
        if config.flash_attention_version is not None:
            runtime.notes.append(f"attention: FlashAttention {config.flash_attention_version}")
        return Model(transformer, chunks, runtime)
    if not config.no_gradient_accumulation_fusion:
        accumulate_wgrad(chunks)
    return Model(transformer, chunks, TERuntime(recipe, str(te)))


def bind(config: Config, recipe: Recipe, chunks: Sequence[torch.nn.Module]) -> RecipeRuntime:
    """Bind a model of this project's layers to a recipe, replacing an earlier one."""
    return bind_recipe(
        chunks,
        recipe,
        num_layers=config.shape.num_layers,
        seed=config.seed,
        accumulate_wgrad=not config.no_gradient_accumulation_fusion,
        share_rng_across_dp=config.share_rng_across_dp,
        reduce_amax=not config.no_amax_reduce,
        cache_weights=not config.no_cache_weights and microbatches_of(config, torch.distributed.get_world_size()) > 1,
        save_memory=bool(config.save_memory),
        emulate=emulated_rows(config.emulate, config.native),
        emulate_accumulator=config.emulate_accumulator,
        rerun_in_bf16=config.rerun_in_bf16,
        fp8_gather=config.fp8_sequence_parallel_gather,
        fp8_dispatch=config.moe_fp8_dispatch,
        total_steps=config.train_iters,
        recompute_gelu=config.recompute_gelu,
    )


def transformer_config(config: Config, te: TEConfig | None = None) -> TransformerConfig:
    """Megatron-core's config of the model: sizes, numerics and parallelism.

    ``te`` is the recipe of TransformerEngine's layers, None for this project's layers.
    """
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    on_gpu, architecture = torch.cuda.is_available(), architecture_of(config)
    virtual = virtual_stages(config)
    kind = MLATransformerConfig if config.multi_latent_attention else TransformerConfig
    found = kind(
        **architecture.attention.transformer_fields(config),
        **architecture.mlp.transformer_fields(config),
        num_layers=config.shape.num_layers,
        hidden_size=config.shape.hidden_size,
        normalization=config.normalization,
        layernorm_epsilon=config.norm_epsilon,
        add_bias_linear=not config.disable_bias_linear,
        hidden_dropout=config.hidden_dropout,
        init_method_std=config.init_method_std,
        bf16=config.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Without it draws depend on the tensor-parallel size; with it experts repeat on expert-parallel ranks.
        use_cpu_initialization=config.use_cpu_initialization or (not on_gpu and config.expert_model_parallel_size == 1),
        bias_dropout_fusion=True,
        # This project's kernel sums in a fixed order, Megatron-core's does not.
        cross_entropy_loss_fusion=on_gpu and (have_triton() or not config.deterministic_mode),
        # These need apex or TE; this project's linears accumulate into main_grad themselves.
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=te is not None and config.position_embedding_type == "rope" and config.rope_type == "rope",
        transformer_impl=config.transformer_impl,
        fp8_param=bool(config.fp8_param_gather) and te is not None,  # TransformerEngine's layers only
        **(te.transformer_config() if te is not None else {}),
        calculate_per_token_loss=config.calculate_per_token_loss,
        deterministic_mode=config.deterministic_mode,
        recompute_granularity=config.recompute_granularity,
        recompute_method=config.recompute_method,
        recompute_num_layers=config.recompute_num_layers,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        # Without these two an interleaved pipeline silently trains on wrong activations.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        # Keep only the gradient function of a stage's output. An interleaved stage would free the output while it is
        # still being sent: a pending send holds the tensor, but not the memory that it had.
        deallocate_pipeline_outputs=config.pipeline_model_parallel_size > 1 and virtual is None,
    )
    for name, value in rope.yarn_attributes(config).items():
        setattr(found, name, value)
    return found


def _gpt_chunks(config: Config, transformer: TransformerConfig, padded_vocab_size: int) -> list[torch.nn.Module]:
    """The chunks of this pipeline stage on this rank's device; one without interleaving."""
    virtual = transformer.virtual_pipeline_model_parallel_size
    chunks: list[torch.nn.Module] = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual is not None else None
        model = LowPrecGPTModel(
            transformer,
            architecture_of(config).block_spec(config, transformer, vp_stage),
            vocab_size=padded_vocab_size,
            max_sequence_length=config.shape.max_position_embeddings,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            position_embedding_type="yarn" if config.rope_type == "yarn" else config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            rope_scaling=config.use_rope_scaling,
            rope_scaling_factor=config.rope_scaling_factor,
            vp_stage=vp_stage,
        )
        model.output_layer_chunk_size = config.output_layer_chunk_size
        if config.position_embedding_init_std is not None and model.pre_process:
            # Scaled, not drawn again: all other random numbers stay the same.
            positions = model.embedding.position_embeddings.weight
            positions.data.mul_(config.position_embedding_init_std / config.init_method_std)
        if torch.cuda.is_available():
            model.cuda(torch.cuda.current_device())
        chunks.append(Float16Module(transformer, model) if config.bf16 else model)
    return chunks


def _data_parallel(
    config: ParallelOptions, fp8_param_gather: bool, transformer: TransformerConfig, bare: list[torch.nn.Module]
) -> list[DistributedDataParallel]:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=transformer.bf16 and not config.grad_reduce_in_bf16,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        # The interleaved schedule starts gathers on all stages at once; else a bucket starts the next.
        align_param_gather=config.overlap_param_gather and transformer.virtual_pipeline_model_parallel_size is not None,
        use_distributed_optimizer=config.use_distributed_optimizer,
        fp8_param_gather=fp8_param_gather,
        bucket_size=max(40_000_000, 1_000_000 * mpu.get_data_parallel_world_size())
        if config.overlap_grad_reduce
        else None,
    )
    # Only the first chunk's gradients are complete as late as the end of backward; other buckets would fill too late.
    chunks = [DistributedDataParallel(transformer, ddp, c, disable_bucketing=i > 0) for i, c in enumerate(bare)]
    if not fp8_param_gather:  # collectives reject FP8 weights, and one seed gives all ranks the same model
        for chunk in chunks:
            chunk.broadcast_params()
    if config.overlap_grad_reduce:
        _overlap(transformer, chunks, ddp.align_param_gather)
    return chunks


def _overlap(transformer: TransformerConfig, chunks: list[DistributedDataParallel], align: bool) -> None:
    """Set the schedules' callbacks that delay and start collectives; one function, or one per chunk."""
    several = len(chunks) > 1
    transformer.no_sync_func = [c.no_sync for c in chunks] if several else chunks[0].no_sync
    transformer.grad_sync_func = [c.start_grad_sync for c in chunks] if several else chunks[0].start_grad_sync
    if align:
        transformer.param_sync_func = [c.start_param_sync for c in chunks] if several else chunks[0].start_param_sync


def _optimizer_config(config: Config, schedule: Schedule, transformer: TransformerConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",  # build_optimizer replaces it
        lr=schedule.max_lr,
        min_lr=schedule.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
        fp8_recipe=transformer.fp8_recipe if transformer.fp8 else None,
        log_num_zeros_in_grad=config.log_num_zeros_in_grad,
    )


def _inner_options(config: Config) -> dict[str, Any]:
    """Values of the options that only the optimizer reads, without its prefix."""
    prefix = f"{config.optimizer}_"
    return {name.removeprefix(prefix): getattr(config, name) for name in OPTIONS if name.startswith(prefix)}


def implementation(config: RecipeOptions, trainer: Trainer) -> str:
    """Names the layers and the optimizer in use: Megatron-core prefers TransformerEngine's or apex's Adam."""
    if isinstance(trainer.runtime, TERuntime):
        layers = f"transformer_engine {get_te_version()}"
    else:
        layers = f"local, {'Megatron-core' if config.no_lowprec_linears else 'this project'}'s linears"
    inner = type(torch_optimizers(trainer.optimizer)[0])
    return f"{layers}; optimizer {inner.__name__} of {inner.__module__.split('.')[0]}"


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
        wd_incr_steps=schedule.weight_decay_incr_samples or 0,  # 0 with constant weight decay: no effect
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=schedule.wsd_decay_samples,
        lr_wsd_decay_style=schedule.wsd_decay_style,
    )


@contextmanager
def gathered(trainer: Trainer) -> Iterator[None]:
    """All weights up to date on every rank: --overlap-param-gather leaves the last update ungathered."""
    if not trainer.chunks[0].ddp_config.overlap_param_gather:
        yield
        return
    for chunk in trainer.chunks:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in trainer.chunks:
            chunk.enable_forward_pre_hook()
