"""Bytes that sequence parallelism moves between tensor-parallel ranks, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_lowprec.recipe.coverage import LinearSite, why_not_gathered
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.rank_sizes import tokens_of, width_of
from megatron_lowprec.training.models.sizes import linear_sites, sharding


def planned_transfers(config: Config, recipe: Recipe) -> dict[str, int]:
    """``layer_transfers`` of a configuration with sequence parallelism: all layers of the model but experts."""
    return layer_transfers(
        [site for site in linear_sites(config) if not sharding(config, site).experts],
        recipe,
        tokens_of(config),
        width_of(config),
        ranks=config.tensor_model_parallel_size,
        num_layers=config.shape.num_layers,
        fp8_gather=config.fp8_sequence_parallel_gather,
        rerun_in_bf16=config.rerun_in_bf16,
    )


def layer_transfers(
    sites: Iterable[LinearSite],
    recipe: Recipe,
    tokens: int,
    width: int,
    *,
    ranks: int,
    num_layers: int,
    fp8_gather: bool,
    rerun_in_bf16: Sequence[str] = (),
) -> dict[str, int]:
    """Bytes that a rank receives for one microbatch, by collective, summed over linear layers.

    Each of N ranks receives (N - 1) / N of a gathered tensor, and as much of a reduce-scattered one in a ring. A layer
    that is recomputed repeats the collectives of the forward pass.

    Args:
        sites: linear layers whose tokens are sharded outside of them; not experts.
        tokens: of the microbatch, on all ranks.
        width: bytes of a value in the compute dtype.
        fp8_gather: whether FP8 codes are gathered where the recipe permits.
        rerun_in_bf16: globs of single GEMMs that are not quantized.
    """
    received = dict.fromkeys(
        (
            "inputs, gathered in the forward pass",
            "outputs, reduce-scattered in the forward pass",
            "output gradients, gathered in the backward pass",
            "inputs, gathered again in the backward pass",
            "input gradients, reduce-scattered in the backward pass",
        ),
        0,
    )
    used = recipe.in_bf16(rerun_in_bf16)
    for site in sites:
        column = site.split == "column"
        values = tokens * (site.in_features if column else site.out_features) * (ranks - 1) // ranks
        linear = used.at(site.layer(num_layers))
        permitted = why_not_gathered(linear, "input" if column else "grad_output") is None
        gathered = values * (1 if fp8_gather and permitted else width)
        if column:
            received["inputs, gathered in the forward pass"] += gathered
            received["inputs, gathered again in the backward pass"] += gathered
            received["input gradients, reduce-scattered in the backward pass"] += values * width
        else:
            received["outputs, reduce-scattered in the forward pass"] += values * width
            received["output gradients, gathered in the backward pass"] += gathered
    return received
