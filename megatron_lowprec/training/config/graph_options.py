"""Whether a run captures its layers in CUDA graphs (``--cuda-graph-impl``)."""

from __future__ import annotations

from dataclasses import replace

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.schema import Recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.architectures import architecture_of


def resolve_cuda_graphs(config: Config, recipe: Recipe, gpus: bool) -> tuple[Config, list[str]]:
    """Turn ``auto`` into ``local`` or ``none``, with the reason for none on GPUs; call it after ``resolve_run``.

    Raises:
        UserError: ``local`` was asked and is not possible.
    """
    if config.cuda_graph_impl == "none":
        return config, []
    reason = _obstacle(config, recipe, gpus)
    if reason is None:
        return replace(config, cuda_graph_impl="local"), []
    if config.cuda_graph_impl == "local":
        raise UserError(f"--cuda-graph-impl local was given, but {reason}; leave one of the two out")
    return without_graphs(config), [f"CUDA graphs: off, {reason}"] if gpus else []


def without_graphs(config: Config) -> Config:
    """The configuration with eager layers."""
    return replace(config, cuda_graph_impl="none")


def _obstacle(config: Config, recipe: Recipe, gpus: bool) -> str | None:
    """Why layers cannot be captured whole and replayed one microbatch after the other; None if they can."""
    if config.transformer_impl != "local":
        return f"the layers are those of --transformer-impl {config.transformer_impl}"
    part = architecture_of(config).mlp.graph_obstacle(config)
    if part is not None:
        return part
    if config.pipeline_model_parallel_size > 1:
        return (
            f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size} has several microbatches on their "
            "way, and graphs hold the activations of one"
        )
    if config.recompute_granularity is not None:
        return f"--recompute-granularity {config.recompute_granularity} runs layers twice (--recompute-gelu works)"
    if config.log_quantization_interval == 1:
        return "--log-quantization-interval 1 runs layers kernel by kernel in every iteration"
    if config.distributed_backend == "gloo" and config.tensor_model_parallel_size > 1:
        return "--distributed-backend gloo runs tensor-parallel collectives on the host"
    if recipe.gradients.stored:
        return f"recipe {recipe.name} stores gradients in {recipe.gradients.format.upper()}, at changing addresses"
    if any(form != "none" for form in recipe.activations.formats.values()):
        return f"recipe {recipe.name} saves activations in formats of its own"
    return None if gpus else "torch sees no GPU"
