"""Megatron-core's optimizer and gradient exchange under a recipe: the part of a recipe outside of the linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from megatron_lowprec.comm.gradients import GradientFactor
from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.optim.fp8_param_gather import finalize
from megatron_lowprec.mcore.optim.gradient_storage import decode_gradients_in, store_gradients_in
from megatron_lowprec.mcore.optim.gradient_sum import sum_gradients_in
from megatron_lowprec.mcore.optim.optimizer_step import copy_weights_at_once, fuse_adamw
from megatron_lowprec.mcore.optim.scaled_adam import keeps_main_weights, use_scaled_adam
from megatron_lowprec.mcore.optim.whole_matrices import matrices_of
from megatron_lowprec.mcore.patches import bind
from megatron_lowprec.optimizer.optimizers import OPTIMIZERS, OptimizerRow, check_recipe
from megatron_lowprec.quantization.primary_weight import Fp8Weight
from megatron_lowprec.recipe.parsing import RecipeLike, as_recipe
from megatron_lowprec.recipe.recipe import Recipe


class RecipeOptimizer(NamedTuple):
    """Result of ``build_optimizer``.

    Attributes:
        optimizer: updated by ``optimizer_step``.
        factor: factor and saturation of gradients in FP8, None for other gradients. Call ``factor.forget`` before each
            step's first forward pass and ``factor.end_step`` after each update.
    """

    optimizer: MegatronOptimizer
    factor: GradientFactor | None


_without_gloo = partial(get_megatron_optimizer, use_gloo_process_groups=False)


def build_optimizer(
    chunks: list[DistributedDataParallel],
    recipe: RecipeLike,
    options: OptimizerConfig,
    *,
    seed: int,
    build: Callable[..., MegatronOptimizer] = _without_gloo,
    inner: str = "adam",
    inner_options: Mapping[str, Any] | None = None,
) -> RecipeOptimizer:
    """Megatron-core's optimizer for wrapped chunks, with the recipe's optimizer state and exchange of gradients.

    Call it once on each rank, after ``bind_recipe``, after ``use_primary_weights`` if the recipe has FP8 weights, and
    after the chunks are wrapped.

    Args:
        chunks: this rank's model chunks.
        recipe: the bound recipe, or its name or file.
        options: Megatron-core's options of the optimizer; changed if the recipe's state is quantized.
        seed: base of the random streams of stochastic rounding.
        build: Megatron-core's builder, called with ``options`` and ``chunks``.
        inner: row of ``OPTIMIZERS`` that replaces the AdamW inside what ``build`` returns.
        inner_options: what the row's ``build`` takes; without one, its default.

    Raises:
        UserError: the recipe has a state that ``inner`` has not; or it changes training, and the chunks or ``options``
            lack the distributed optimizer, an option of theirs is not supported, or the weights are not FP8 although
            the recipe says so.
    """
    recipe = as_recipe(recipe)
    if recipe.changes_training and not (
        options.use_distributed_optimizer and all(c.ddp_config.use_distributed_optimizer for c in chunks)
    ):
        raise UserError(
            f"recipe {recipe.name} quantizes optimizer state, gradients or weights, which needs Megatron-core's "
            "distributed optimizer: set use_distributed_optimizer in OptimizerConfig and DistributedDataParallelConfig"
        )
    if recipe.fp8_weights and not any(isinstance(weight, Fp8Weight) for c in chunks for weight in c.parameters()):
        raise UserError(
            f"recipe {recipe.name} has FP8 weights, and these chunks have none: call use_primary_weights(chunks) of "
            "mcore.optim.fp8_param_gather after bind_recipe, and wrap the chunks with fp8_param_gather=True"
        )
    check_recipe(inner, recipe)
    factor = _exchange_gradients(chunks, recipe) if recipe.gradients.quantized else None
    if recipe.optimizer.quantized:
        keeps_main_weights(options)
    optimizer = build(options, chunks)
    for built in torch_optimizers(optimizer):
        if type(built) is torch.optim.AdamW:
            # Without TE or apex Megatron-core uses torch's AdamW with defaults, tensor by tensor.
            for group in [built.defaults, *built.param_groups]:
                group["fused"], group["foreach"] = True, False
    if recipe.optimizer.quantized:
        use_scaled_adam(optimizer, recipe.optimizer, chunks, seed)
    _replace_inner(optimizer, OPTIMIZERS[inner], chunks, inner_options or {})
    fuse_adamw(optimizer)
    copy_weights_at_once(optimizer)
    if recipe.gradients.stored:
        for part in optimizer.chained_optimizers:
            decode_gradients_in(part)
    finalize(optimizer, chunks)
    return RecipeOptimizer(optimizer, factor)


def _replace_inner(
    optimizer: MegatronOptimizer,
    row: OptimizerRow,
    chunks: Sequence[DistributedDataParallel],
    options: Mapping[str, Any],
) -> None:
    for part in optimizer.chained_optimizers:
        if row.build is None or part.is_stub_optimizer:
            continue
        matrices = matrices_of(part, chunks, not options.get("no_split_qkv")) if row.whole_matrices else []
        groups = part.optimizer.param_groups
        built = row.build([{**group, "params": []} for group in groups], part.optimizer.defaults, matrices, options)
        for group, own in zip(groups, built.param_groups, strict=True):
            own["params"] = group["params"]  # shards may be no leaves, which torch's constructors refuse
        bind("inner_optimizer", part, optimizer=built)


def _exchange_gradients(chunks: Sequence[DistributedDataParallel], recipe: Recipe) -> GradientFactor:
    spec = recipe.gradients
    _check_options(chunks, recipe)
    factor = GradientFactor(chunks[0].buffers[0].grad_data.device, automatic=spec.mu == "automatic")
    if spec.stored:
        store_gradients_in(chunks, spec, factor)
        # Megatron-core's schedules tell a step's last microbatch by it; with overlaps the training loop sets it.
        config = get_model_config(chunks[0])
        if config.no_sync_func is None and not chunks[0].ddp_config.overlap_grad_reduce:
            several = len(chunks) > 1
            config.no_sync_func = [chunk.no_sync for chunk in chunks] if several else chunks[0].no_sync
    else:
        sum_gradients_in(chunks, spec, factor)
    return factor


def _check_options(chunks: Sequence[DistributedDataParallel], recipe: Recipe) -> None:
    """Check what Megatron-core would do in the reduction that the recipe replaces; UserError names the option."""
    wanted = {
        "average_in_collective": False,
        "num_distributed_optimizer_instances": 1,
        "param_name_patterns_for_fp32_local_accumulation": (),  # from 0.17 on
    }
    for name, value in wanted.items():
        if any(getattr(chunk.ddp_config, name, value) != value for chunk in chunks):
            raise UserError(
                f"recipe {recipe.name} reduces gradients in {recipe.gradients.format.upper()}, without {name}: set "
                f"{name}={value} in DistributedDataParallelConfig, or gradients.format=none in the recipe"
            )
    if recipe.gradients.stored and get_model_config(chunks[0]).gradient_accumulation_fusion:
        raise UserError(
            f"recipe {recipe.name} stores gradients in {recipe.gradients.format.upper()}, and apex would write past "
            "them: set gradient_accumulation_fusion=False in TransformerConfig, or gradients.accumulation=buffer"
        )


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron-core's, one for dense and one for expert weights."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]
