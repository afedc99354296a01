"""Counts derived from a model's sizes, without megatron or torch: linear layers, parameters, operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.architectures import architecture_of
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.options.model_options import ModelOptions
from megatron_lowprec.training.options.moe_options import MoeOptions
from megatron_lowprec.training.options.parts import ModelShape


def linear_sites(config: Config, layers: Sequence[int] | None = None) -> list[LinearSite]:
    """Every linear layer that a recipe may change, in the order of the forward pass; unsharded sizes of one expert.

    ``layers`` are numbers of transformer layers, from 1; None for all.
    """
    architecture = architecture_of(config)
    return [
        site
        for layer in (range(1, config.shape.num_layers + 1) if layers is None else layers)
        for part in (architecture.attention, architecture.mlp)
        for site in part.linear_sites(config, layer)
    ]


def sharding(config: Config, site: LinearSite) -> Sharding:
    """Copies of a linear layer, and their sharding over ranks."""
    architecture = architecture_of(config)
    part = architecture.mlp if site.name.startswith("mlp.") else architecture.attention
    return part.sharding(config, site)


def tensor_ranks(config: Config) -> Callable[[LinearSite], int]:
    """Number of ranks that shard a linear layer: 1 for experts that are spread over ranks."""
    return lambda site: sharding(config, site).tensor_ranks


def has_experts(config: MoeOptions) -> bool:
    """Whether MLPs are experts, which are sharded over other ranks than the rest of a model."""
    return bool(config.num_experts)


def has_bias(config: ModelOptions, site: LinearSite) -> bool:
    """Whether a linear layer has a bias; Megatron-core gives the projections of latent attention none."""
    if site.name.rpartition(".")[2].startswith(("linear_q_", "linear_kv_")):
        return False
    return not config.disable_bias_linear or (config.add_qkv_bias and site.name.endswith("qkv"))


def norm_weights(shape: ModelShape) -> int:
    """Weights of one norm."""
    return shape.hidden_size * (2 if shape.normalization == "LayerNorm" else 1)


def other_weights(config: Config, layer: int) -> int:
    """Weights of one layer outside of its linear layers."""
    architecture = architecture_of(config)
    of_parts = sum(part.other_weights(config, layer) for part in (architecture.attention, architecture.mlp))
    return of_parts + 2 * norm_weights(config.shape)


def num_non_embedding_parameters(config: Config) -> int:
    """Parameters without token embedding, output layer and position table; all experts count."""
    total = norm_weights(config.shape)  # final norm
    for site in linear_sites(config):
        weights = site.in_features * site.out_features + has_bias(config, site) * site.out_features
        total += sharding(config, site).copies * weights
    return total + sum(other_weights(config, layer) for layer in range(1, config.shape.num_layers + 1))


def num_parameters(config: Config, padded_vocab_size: int) -> int:
    """Parameters of the whole model, including the padded vocabulary."""
    hidden = config.shape.hidden_size
    total = num_non_embedding_parameters(config)
    total += padded_vocab_size * hidden * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "learned_absolute":
        total += config.shape.max_position_embeddings * hidden
    return total


def flops_per_sample(config: Config, padded_vocab_size: int) -> float:
    """Floating-point operations of one sample's forward and backward, by Megatron-LM's formula.

    Linear layers and logits count 2 operations per weight and token, attention's two GEMMs half of that for the causal
    mask; the backward counts twice the forward. Recomputation is not counted (model FLOPs).
    """
    hidden, layers, seq = config.shape.hidden_size, config.shape.num_layers, config.shape.seq_length
    linears = sum(
        site.in_features * site.out_features * sharding(config, site).copies_per_token for site in linear_sites(config)
    )
    attention = layers * architecture_of(config).attention.score_channels(config) * seq
    return 3.0 * 2.0 * seq * (linears + attention + hidden * padded_vocab_size)
