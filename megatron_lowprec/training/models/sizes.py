"""What follows from a model's sizes alone, without megatron or torch: linear layers, parameters, operations."""

from __future__ import annotations

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.options import Config


def require(value: int | None) -> int:
    """A size that ``resolve`` has filled."""
    assert value is not None, "resolve() has not run"
    return value


def linear_sites(config: Config) -> list[LinearSite]:
    """Every linear layer that a recipe may change, in the order of the forward pass; unsharded sizes of one expert."""
    hidden, kv_channels = require(config.hidden_size), require(config.kv_channels)
    heads, groups = require(config.num_attention_heads), config.num_query_groups
    if config.num_experts:
        mlp, ffn = "mlp.experts", require(config.moe_ffn_hidden_size)
    else:
        mlp, ffn = "mlp", require(config.ffn_hidden_size)
    gates = 2 if config.swiglu else 1
    return [
        site
        for layer in range(1, require(config.num_layers) + 1)
        for site in (
            LinearSite(layer, "self_attention.linear_qkv", hidden, kv_channels * (heads + 2 * groups), "column"),
            LinearSite(layer, "self_attention.linear_proj", kv_channels * heads, hidden, "row"),
            LinearSite(layer, f"{mlp}.linear_fc1", hidden, gates * ffn, "column", gated=gates == 2),
            LinearSite(layer, f"{mlp}.linear_fc2", ffn, hidden, "row"),
        )
    ]


def num_parameters(config: Config, padded_vocab_size: int) -> int:
    """Parameters of the whole model, the padded vocabulary included."""
    hidden, layers = require(config.hidden_size), require(config.num_layers)
    norm = hidden * (2 if config.normalization == "LayerNorm" else 1)
    total = norm  # the final one
    for site in linear_sites(config):
        copies = config.num_experts if config.num_experts and "experts" in site.name else 1
        bias = not config.disable_bias_linear or (config.add_qkv_bias and site.name.endswith("qkv"))
        total += copies * (site.in_features * site.out_features + bias * site.out_features)
    total += layers * 2 * norm
    if config.num_experts:
        total += layers * config.num_experts * hidden
    total += padded_vocab_size * hidden * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "learned_absolute":
        total += require(config.max_position_embeddings) * hidden
    return total


def flops_per_sample(config: Config, padded_vocab_size: int) -> float:
    """Floating-point operations of one sample's forward and backward, by Megatron-LM's formula.

    Linear layers and logits count 2 operations a weight and token, attention's two products half of that for the
    causal mask; the backward counts twice the forward. Recomputation is not counted (model FLOPs).
    """
    hidden, layers, seq = require(config.hidden_size), require(config.num_layers), require(config.seq_length)
    linears = sum(
        site.in_features * site.out_features * (config.moe_router_topk if "experts" in site.name else 1)
        for site in linear_sites(config)
    )
    attention = layers * require(config.kv_channels) * require(config.num_attention_heads) * seq
    return 3.0 * 2.0 * seq * (linears + attention + hidden * padded_vocab_size)


def check_divisible(what: str, size: int, by_what: str, divisor: int) -> None:
    """One way to say that a size does not divide."""
    if divisor < 1 or size % divisor:
        raise UserError(f"{what} {size} is not divisible by {by_what} {divisor}; change one of the two")
