"""Whether a run captures its layers in CUDA graphs (``--cuda-graph-impl``)."""

from __future__ import annotations

from dataclasses import replace

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.capture import why_not_captured
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import microbatches_of
from megatron_lowprec.training.models.architectures import architecture_of


def resolve_cuda_graphs(config: Config, recipe: Recipe, world_size: int, gpus: bool) -> tuple[Config, list[str]]:
    """Turn ``auto`` into ``local`` or ``none``, with the reason for none on GPUs; call it after ``resolve_run``.

    Raises:
        UserError: ``local`` was asked and is not possible.
    """
    if config.cuda_graph_impl == "none":
        return config, []
    found = _obstacle(config, recipe, world_size, gpus)
    if found is None:
        return replace(config, cuda_graph_impl="local"), []
    reason, remedy = found
    if config.cuda_graph_impl == "local":
        raise UserError(f"--cuda-graph-impl local was given, but {reason}; {remedy}")
    return without_graphs(config), [f"CUDA graphs: off, {reason}"] if gpus else []


def without_graphs(config: Config) -> Config:
    """The configuration with eager layers."""
    return replace(config, cuda_graph_impl="none")


def _obstacle(config: Config, recipe: Recipe, world_size: int, gpus: bool) -> tuple[str, str] | None:
    """Why layers cannot be captured whole and replayed one microbatch after the other, and the remedy; None if they
    can.
    """
    choose = "leave one of the two out"
    if config.transformer_impl != "local":
        return f"the layers are those of --transformer-impl {config.transformer_impl}", choose
    part = architecture_of(config).mlp.graph_obstacle(config)
    if part is not None:
        return part, choose
    if config.pipeline_model_parallel_size > 1:
        reason = (
            f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size} has several microbatches on their "
            "way, and graphs hold the activations of one"
        )
        return reason, choose
    if config.reset_attention_mask:
        return "--reset-attention-mask gives every microbatch a mask of its own", choose
    if config.recompute_granularity is not None:
        granularity = config.recompute_granularity
        return f"--recompute-granularity {granularity} runs layers twice (--recompute-gelu works)", choose
    if config.log_quantization_interval == 1:
        return "--log-quantization-interval 1 runs layers kernel by kernel in every iteration", "give 2 or more"
    if config.distributed_backend == "gloo" and config.tensor_model_parallel_size > 1:
        return "--distributed-backend gloo runs tensor-parallel collectives on the host", "use nccl"
    found = why_not_captured(recipe, microbatches_of(config, world_size) > 1)
    if found is not None:
        overrides = " ".join(f"--recipe-override {override}" for override in found[1])
        return found[0], f"add {overrides}" + (" or raise --micro-batch-size" if "gradients" in overrides else "")
    return None if gpus else ("torch sees no GPU", "leave it out")
