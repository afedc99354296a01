"""Options that save memory; two do by default in large models, where their share of the time is small."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import primary_weight_spec
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.rank_sizes import tokens_of
from megatron_lowprec.training.models.sizes import has_experts, num_non_embedding_parameters

LARGE = 1e9  # parameters without embeddings


def resolve_memory(config: Config, recipe: Recipe) -> Config:
    """Fill --fp8-param-gather and --save-memory."""
    large = is_large(config)
    if config.fp8_param_gather is None:
        config = replace(config, fp8_param_gather=large and _why_not_fp8(config, recipe) is None)
    if config.save_memory is None and config.transformer_impl == "local":
        config = replace(config, save_memory=large and recipe.quantized)
    return config


def check_chunks(config: Config) -> None:
    """Refuse a chunk of the loss that holds a whole microbatch; call it in ``resolve_run``."""
    size, tokens = config.output_layer_chunk_size, tokens_of(config)
    if size is not None and size >= tokens:
        raise UserError(
            f"--output-layer-chunk-size {size} saves no memory: a microbatch has {tokens} tokens on a rank; give "
            "fewer, or leave it out"
        )


def memory_notes(config: Config, recipe: Recipe, given: Collection[str]) -> list[str]:
    """Notes about chunks of the loss, and about both defaults if the model's size decided them.

    Call it after ``stored_weights``.

    Args:
        given: names of options that the user set.
    """
    notes, size = list[str](), config.output_layer_chunk_size
    if size is not None:
        tokens = tokens_of(config)
        notes.append(
            f"--output-layer-chunk-size {size}: logits of {size} of a microbatch's {tokens} tokens at once, which the "
            "backward pass computes again"
        )
    if not is_large(config):
        return notes
    if "fp8_param_gather" not in given and not recipe.fp8_weights:
        reason = _why_not_fp8(config, recipe)
        if config.fp8_param_gather:
            notes.append(
                "--fp8-param-gather is on, as from 1e9 parameters on: --no-fp8-param-gather keeps bf16 weights"
            )
        elif reason is not None and _has_primary_weights(recipe):
            notes.append(f"--fp8-param-gather is off: {reason}")
    if "save_memory" not in given and config.save_memory:
        notes.append("--save-memory is on, as from 1e9 parameters on: --no-save-memory keeps more activations")
    return notes


def is_large(config: Config) -> bool:
    """Whether the size of a model of this project's layers puts options on by default."""
    return config.transformer_impl == "local" and num_non_embedding_parameters(config) >= LARGE


def _has_primary_weights(recipe: Recipe) -> bool:
    return any(primary_weight_spec(linear) is not None for linear in recipe.linear_recipes)


def _why_not_fp8(config: Config, recipe: Recipe) -> str | None:
    """Why weights are not FP8 codes by default; None if they are."""
    if not _has_primary_weights(recipe) or recipe.phases:
        return f"recipe {recipe.name} does not keep one FP8 weight for fprop and dgrad"
    if recipe.changes_training:
        return f"recipe {recipe.name} sets the storage of its state, and keeps bf16 weights"
    if has_experts(config):
        return "its cost is not measured with experts"
    needs = {"--use-distributed-optimizer": config.use_distributed_optimizer, "--bf16": config.bf16}
    missing = [option for option, given in needs.items() if not given]
    if missing:
        return f"it needs {' and '.join(missing)}"
    reads = {
        "--capture-step": config.capture_step,
        "--log-quantization-interval": config.log_quantization_interval,
        "--rerun-in-bf16": config.rerun_in_bf16,
    }
    reading = [option for option, given in reads.items() if given]
    return f"{' and '.join(reading)} read weights in bf16" if reading else None
