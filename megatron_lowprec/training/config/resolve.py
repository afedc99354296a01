"""Fills derived options, and rejects invalid ones before a process group, data or a GPU is used."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.backends.emulated.why_not import check_accumulator
from megatron_lowprec.optimizer.optimizers import check_recipe
from megatron_lowprec.recipe.coverage import check_fp8_gather
from megatron_lowprec.recipe.fp8_dispatch import check_fp8_dispatch
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.te.translation import INSTALL
from megatron_lowprec.training.config.arguments import flag, required
from megatron_lowprec.training.config.data_options import resolve_data
from megatron_lowprec.training.config.fields import check_divisible
from megatron_lowprec.training.config.memory_options import check_chunks, resolve_memory
from megatron_lowprec.training.config.options import DEFAULTS, OPTIONS, Config, options_with, unmet
from megatron_lowprec.training.config.recipe_checks import check_saved_activations, check_stored_gradients
from megatron_lowprec.training.data.blend import resolve_phase
from megatron_lowprec.training.models.architectures import architecture_of
from megatron_lowprec.training.options.parts import Steps
from megatron_lowprec.training.options.training_options import ParallelOptions
from megatron_lowprec.training.rampup import check_rampup, run_length


def resolve_model(config: Config) -> Config:
    """Fill Megatron's defaults for derived sizes; check what does not depend on the world size."""
    required(config, *(name for name in options_with(required=True) if not unmet(config, OPTIONS[name].needs)))
    _in_bounds(config)
    if config.tensor_model_parallel_size == 1:
        config = replace(config, sequence_parallel=False)  # as Megatron-LM does
    _no_idle_flags(config)
    architecture = architecture_of(config)
    config = architecture.mlp.resolve(architecture.attention.resolve(config))
    config = replace(config, max_position_embeddings=config.max_position_embeddings or config.seq_length)
    if config.shape.seq_length > config.shape.max_position_embeddings:
        raise UserError(
            f"--seq-length {config.seq_length} is longer than --max-position-embeddings "
            f"{config.max_position_embeddings}; raise the latter"
        )
    if config.position_embedding_init_std is not None and (
        config.position_embedding_type != "learned_absolute" or not config.init_method_std
    ):
        raise UserError(
            f"--position-embedding-init-std {config.position_embedding_init_std} scales learned positions, drawn with "
            f"--init-method-std; found --position-embedding-type {config.position_embedding_type} and "
            f"--init-method-std {config.init_method_std}"
        )
    return config


def resolve_recipe(config: Config, recipe: Recipe, given: frozenset[str]) -> tuple[Config, list[str]]:
    """Options required by the recipe's optimizer, gradients and weights, with notes about those switched on.

    Args:
        given: names of options that the user set.

    Raises:
        UserError: an option excludes the recipe's storage of gradients or activations; its weights are stored in FP8,
            without --bf16; an option that it requires was switched off; its operands cannot be sent as FP8 codes; or
            none of its GEMMs has an accumulator to emulate.
    """
    if config.emulate_accumulator:
        check_accumulator(recipe, "cpu")
    if config.fp8_sequence_parallel_gather:
        check_fp8_gather(recipe, config.pipeline_model_parallel_size)
    if config.moe_fp8_dispatch:
        check_fp8_dispatch(recipe)
    if recipe.gradients.stored:
        check_stored_gradients(config, recipe)
    check_saved_activations(config, recipe)
    check_recipe(config.optimizer, recipe)
    if recipe.fp8_weights and not config.bf16:
        raise UserError(
            f"recipe {recipe.name} stores FP8 weights, which needs --bf16: add it, or set --recipe-override "
            "fp8_weights=false"
        )
    needed = {
        "use_distributed_optimizer": recipe.changes_training,
        "fp8_param_gather": recipe.fp8_weights,
    }
    on = [name for name, wanted in needed.items() if wanted and not getattr(config, name)]
    for name in on:
        if name in given:
            off, needs = _shown(name, False), flag(name)
            raise UserError(f"{off} was given, but recipe {recipe.name} needs {needs}: leave one of the two out")
    notes = [f"recipe {recipe.name}: {flag(name)} is on, which it needs" for name in on]
    changes: dict[str, Any] = dict.fromkeys(on, True)
    return resolve_memory(replace(config, **changes), recipe), notes


def resolve_run(config: Config, world_size: int, gpus: bool) -> Config:
    """Resolve the whole run on ``world_size`` processes, after ``resolve_model``."""
    required(config, "lr", *(["global_batch_size"] if config.micro_batch_size is None else []))
    _check_parallelism(config, world_size)
    data_parallel = data_parallel_size(config, world_size)
    batch = config.global_batch_size or (config.micro_batch_size or 0) * data_parallel
    if config.micro_batch_size is None:
        check_divisible("--global-batch-size", batch, "the data-parallel size", data_parallel)
    config = replace(
        config, micro_batch_size=config.micro_batch_size or batch // data_parallel, global_batch_size=batch
    )
    step = config.steps.micro_batch_size * data_parallel
    if batch % step:
        raise UserError(
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {config.micro_batch_size} x "
            f"data-parallel size {data_parallel} = {step}; "
            f"use {max(1, round(batch / step)) * step} or another micro-batch"
        )
    if config.lr is not None and config.min_lr > config.lr:
        raise UserError(f"--min-lr {config.min_lr} is above --lr {config.lr}")
    if (config.train_iters is None) == (config.train_samples is None):
        found = "missing" if config.train_iters is None else "given twice"
        raise UserError(f"the length of the run is {found}: give --train-iters or --train-samples")
    check_rampup(config.steps, config, step)
    if virtual_stages(config) is not None:
        _check_interleaving(config.steps, step * config.pipeline_model_parallel_size)
    if config.train_iters is None:
        config = replace(config, train_iters=run_length(config.steps)[0])
    _check_features(config, gpus)
    return resolve_phase(resolve_data(config), config.steps.samples)


def data_parallel_size(config: ParallelOptions, world_size: int) -> int:
    """Number of data-parallel ranks: same weights, different samples."""
    return world_size // (
        config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
    )


def microbatches_of(config: Config, world_size: int) -> int:
    """Microbatches of a step on one rank, after any ramp of the batch size."""
    samples = config.steps.micro_batch_size * data_parallel_size(config, world_size)
    return config.steps.global_batch_size // samples


def layout_of(config: ParallelOptions, world_size: int) -> dict[str, int]:
    """The parallel layout, in the form that checkpoints store."""
    return {
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "context": config.context_parallel_size,
        "expert": config.expert_model_parallel_size,
        "data": data_parallel_size(config, world_size),
    }


def describe_layout(layout: Mapping[str, int]) -> str:
    """``tensor 2, pipeline 1, ...``"""
    return ", ".join(f"{name} {size}" for name, size in layout.items())


def virtual_stages(config: Config) -> int | None:
    """Chunks of a pipeline stage; None without interleaving."""
    chunks = config.num_virtual_stages_per_pipeline_rank
    if chunks is None and config.num_layers_per_virtual_pipeline_stage is not None:
        layers = config.shape.num_layers // config.pipeline_model_parallel_size
        chunks = layers // config.num_layers_per_virtual_pipeline_stage
    return chunks if chunks is not None and chunks > 1 else None


def _in_bounds(config: Config) -> None:
    """Reject numbers outside their valid range, including NaN."""
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        if value is not None and not option.admits(value):
            raise UserError(f"{flag(name)} {value}: wants {' and '.join(option.bounds)}")


def _no_idle_flags(config: Config) -> None:
    """Reject options that would be ignored silently."""
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        idle = value in (getattr(DEFAULTS, name), option.formerly)  # or off, where size may switch it on
        lacking = None if idle else unmet(config, option.needs)
        if lacking is not None:
            raise UserError(f"{_shown(name, value)} {_how(config, lacking)}")


def _how(config: Config, need: str) -> str:
    """What is wrong with an option that lacks ``need``, and what to do."""
    names, _, values = need.lstrip("!").partition("=")
    first, *others = names.split("|")
    found = _shown(first, getattr(config, first))
    if values:
        wanted = values.replace("|", " or ")
        ask = f"give {flag(first)} {wanted} too, or leave the first out"
        return f"is for {flag(first)} {wanted}, and this run has {found}; {ask}"
    if need.startswith("!"):
        return f"excludes {found}; leave one of the two out"
    # a number that is 0 may be given
    positive = {name for name in (first, *others) if type(getattr(config, name)) in (int, float)}
    asked = " or ".join(flag(name) + " above 0" * (name in positive) for name in (first, *others))
    return f"does nothing without {asked}; add that, or leave it out"


def _shown(name: str, value: object) -> str:
    """The option as a command line gives it."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _check_parallelism(config: Config, world_size: int) -> None:
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    context = config.context_parallel_size
    if context > 1:
        check_divisible("--seq-length", config.shape.seq_length, "2 x --context-parallel-size", 2 * context)
    model = tensor * pipeline * context
    if world_size % model:
        raise UserError(
            f"{world_size} processes are not divisible by tensor {tensor} x pipeline {pipeline} x context {context} = "
            f"{model}; change --nproc-per-node or the parallel sizes"
        )
    architecture = architecture_of(config)
    architecture.attention.check_parallelism(config, world_size // model)
    check_divisible("--hidden-size", config.shape.hidden_size, "--tensor-model-parallel-size", tensor)
    check_divisible("--ffn-hidden-size", config.shape.ffn_hidden_size, "--tensor-model-parallel-size", tensor)
    check_divisible("--num-layers", config.shape.num_layers, "--pipeline-model-parallel-size", pipeline)
    if config.sequence_parallel:
        a_rank = "--seq-length" if context == 1 else "--seq-length of a context-parallel rank,"
        check_divisible(a_rank, config.shape.seq_length // context, "--tensor-model-parallel-size", tensor)
    architecture.mlp.check_parallelism(config, world_size // model)
    a_stage, a_chunk = config.shape.num_layers // pipeline, config.num_layers_per_virtual_pipeline_stage
    if a_chunk is not None:
        check_divisible("layers of a pipeline stage,", a_stage, "--num-layers-per-virtual-pipeline-stage", a_chunk)
    virtual = virtual_stages(config)
    if config.recompute_method == "uniform" and config.recompute_num_layers is not None:
        check_divisible(
            "layers of a stage's chunk,",
            a_stage // (virtual or 1),
            "--recompute-num-layers",
            config.recompute_num_layers,
        )
    if virtual is not None:
        if pipeline == 1:
            raise UserError("interleaving needs --pipeline-model-parallel-size of at least 2")
        check_divisible(
            "layers of a pipeline stage,", config.shape.num_layers // pipeline, "chunks of a stage,", virtual
        )


def _check_implementation(config: Config, gpus: bool) -> None:
    if config.fp8_param_gather:
        needed = {"--use-distributed-optimizer": config.use_distributed_optimizer, "--bf16": config.bf16}
        missing = [option for option, given in needed.items() if not given]
        if missing:
            raise UserError(f"--fp8-param-gather needs {' and '.join(missing)} as well")
    if config.transformer_impl == "local":
        return
    if not gpus:
        raise UserError("--transformer-impl transformer_engine needs GPUs, and torch sees none; leave it out")


def _check_features(config: Config, gpus: bool) -> None:
    _check_implementation(config, gpus)
    _check_capture_step(config)
    _check_profile(config.steps)
    check_chunks(config)
    if config.rope_type == "yarn" and config.yarn_beta_fast <= config.yarn_beta_slow:
        raise UserError(
            f"--yarn-beta-fast {config.yarn_beta_fast:g} is not above --yarn-beta-slow {config.yarn_beta_slow:g}: "
            "frequencies of more turns than the first are kept, those of fewer than the second divided"
        )
    if config.overlap_param_gather and not (config.use_distributed_optimizer and config.overlap_grad_reduce):
        raise UserError("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")
    if config.recompute_granularity == "full" and (
        config.recompute_method is None or config.recompute_num_layers is None
    ):
        raise UserError("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    if config.distributed_backend == "nccl" and not gpus:
        raise UserError("--distributed-backend nccl needs GPUs, and torch sees none; leave the flag out")


def check_packages(config: Config) -> None:
    """Require the packages of a run's options; a plan needs none.

    Raises:
        UserError: TransformerEngine or wandb is not installed.
    """
    if config.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            f"--transformer-impl transformer_engine needs TransformerEngine, which is not installed: {INSTALL}, or "
            "use --transformer-impl local"
        )
    if config.wandb_project and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "--wandb-project needs the package wandb: pip install 'megatron-lowprec[wandb]', or leave the flag out"
        )


def _check_capture_step(config: Config) -> None:
    """Check iterations of --capture-step, and that the layers can be captured."""
    for step in config.capture_step:
        if not 1 <= step <= config.steps.iterations:
            raise UserError(
                f"--capture-step {step} is no iteration of this run, which has 1 to {config.train_iters}; name one of "
                "them"
            )
    if config.capture_step and config.fp8_param_gather:
        raise UserError(
            "--capture-step writes unquantized weights, and with --fp8-param-gather (or a recipe's fp8_weights) no "
            "rank has any; leave one of the two out"
        )


def _check_profile(steps: Steps) -> None:
    start, end = steps.profile_step_start, steps.profile_step_end
    if steps.profile and not 0 <= start < min(end, steps.iterations):
        raise UserError(
            f"--profile-step-start {start} --profile-step-end {end} profile no iteration of this run, which has "
            f"{steps.train_iters}; let the start be below the end and below --train-iters, or leave --profile out"
        )


def _check_interleaving(steps: Steps, turn: int) -> None:
    """Require microbatches in multiples of the stages; Megatron-core checks this only in a step.

    Args:
        turn: samples of one microbatch for each stage, on every data-parallel rank.
    """
    sizes = {"--global-batch-size": steps.global_batch_size}
    if steps.rampup_batch_size is not None:
        start, increment, _ = steps.rampup_batch_size
        sizes |= {"--rampup-batch-size's START": start, "--rampup-batch-size's INCREMENT": increment}
    for name, size in sizes.items():
        check_divisible(name, size, "micro-batch x data-parallel size x pipeline stages (interleaved)", turn)
