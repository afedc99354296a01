"""Megatron's self-attention: grouped heads that share keys and values, learned positions or rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.fields import check_divisible
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.execution import Execution
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.models.common.rank_sizes import cached, norm_output, tokens_of, width_of
from megatron_lowprec.training.options.training_options import ParallelOptions


def resolve(config: Config) -> Config:
    """The options with --kv-channels and --num-query-groups filled."""
    hidden, heads = config.sizes.hidden_size, config.sizes.num_attention_heads
    if config.kv_channels is None:
        check_divisible("--hidden-size", hidden, "--num-attention-heads", heads)
    if config.group_query_attention:
        check_divisible("--num-attention-heads", heads, "--num-query-groups", config.num_query_groups)
    elif config.num_query_groups not in (1, heads):
        raise UserError(
            f"--num-query-groups {config.num_query_groups} does nothing without --group-query-attention; add that, or "
            "leave it out"
        )
    return replace(
        config,
        kv_channels=config.kv_channels or hidden // heads,
        num_query_groups=config.num_query_groups if config.group_query_attention else heads,
    )


def check_parallelism(config: Config, data_parallel_size: int) -> None:
    """Reject a tensor-parallel size that does not divide heads and groups."""
    tensor = config.tensor_model_parallel_size
    check_divisible("--num-attention-heads", config.shape.num_attention_heads, "--tensor-model-parallel-size", tensor)
    check_divisible("--num-query-groups", config.num_query_groups, "--tensor-model-parallel-size", tensor)


def transformer_fields(config: Config) -> dict[str, Any]:
    """Fields of Megatron-core's TransformerConfig."""
    return {
        "num_attention_heads": config.shape.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.shape.kv_channels,
        "add_qkv_bias": config.add_qkv_bias,
        "qk_layernorm": config.qk_layernorm,
        "attention_dropout": config.attention_dropout,
    }


def linear_sites(config: Config, layer: int) -> tuple[LinearSite, ...]:
    """linear_qkv and linear_proj."""
    hidden, channels = config.shape.hidden_size, config.shape.kv_channels
    heads, groups = config.shape.num_attention_heads, config.num_query_groups
    return (
        LinearSite(layer, "self_attention.linear_qkv", hidden, channels * (heads + 2 * groups), "column"),
        LinearSite(layer, "self_attention.linear_proj", channels * heads, hidden, "row"),
    )


def sharding(config: ParallelOptions, site: LinearSite) -> Sharding:
    """One copy, sharded over all tensor-parallel ranks."""
    return Sharding(config.tensor_model_parallel_size)


def other_weights(config: Config, layer: int) -> int:
    """Weights of the norms of queries and keys, of one head each."""
    norm = config.shape.kv_channels * (2 if config.normalization == "LayerNorm" else 1)
    return 2 * norm if config.qk_layernorm else 0


def activations(config: Config, runs: Execution | None, layer: int) -> dict[str, float]:
    """Bytes saved for backward.

    scaled_dot_product_attention saves queries, keys, values, output and the log-sum-exp of each row, no scores; its
    output is saved in addition to linear_proj's FP8 codes of it, unless both save it in a format of the recipe.
    """
    tokens, width, tensor = tokens_of(config), width_of(config), config.tensor_model_parallel_size
    heads, channels = config.shape.num_attention_heads, config.shape.kv_channels
    query = tokens * heads * channels * width / tensor
    key_value = tokens * config.num_query_groups * channels * width / tensor
    turned, grouped = config.position_embedding_type == "rope", config.num_query_groups < heads
    saved = {
        "input of linear_qkv": norm_output(config, runs, layer, "self_attention.linear_qkv"),
        "output of linear_qkv": query + 2 * key_value,
    }
    codes = output_codes(runs, query / width)
    saved |= codes or {"input of linear_proj (output of attention)": query}
    own = runs if runs is not None and not runs.casts_again(config) else None  # linear_proj's, beside attention's
    if not codes and own is not None and own.keeps_codes(config, layer, "self_attention.linear_proj"):
        saved["FP8 codes of linear_proj's input"] = query / width
    if turned or grouped:
        saved["queries and keys on their own"] = query + (key_value if turned else 0.0)
    if config.qk_layernorm:
        saved["inputs of the norms of queries and keys"] = query + key_value
    if turned and not (runs is not None and runs.fused and plain_rope(config)):  # for queries and keys
        saved["cosines and sines"] = 4 * config.shape.seq_length * int(channels * config.rotary_percent) * width
    if config.recompute_granularity != "selective":
        saved |= saved_scores(config)
    return saved


def plain_rope(config: Config) -> bool:
    """Whether a GPU's kernel rotates queries and keys, and saves nothing for it."""
    return config.position_embedding_type == "rope" and config.rope_type == "rope"


def output_codes(runs: Execution | None, entries: float) -> dict[str, float]:
    """Bytes of attention's output of that many entries if the recipe saves it in a format, else empty."""
    return cached(runs, "attention_output", "input of linear_proj (output of attention)", entries)


def recomputed_bytes(config: Config) -> float:
    """Bytes of the scores, which only Megatron-core's unfused attention stores."""
    return _scores(config) if config.attention_backend == "local" else 0.0


def score_channels(config: Config) -> float:
    """Channels of all heads."""
    return config.shape.kv_channels * config.shape.num_attention_heads


def saved_scores(config: Config) -> dict[str, float]:
    """Bytes that core attention saves beside its inputs and its output."""
    if config.attention_backend == "local":
        return {"scores of attention": _scores(config)}
    return {"log-sum-exp of attention": 4 * _score_rows(config)}


def _scores(config: Config) -> float:
    """Bytes of attention probabilities in fp32 and in the compute dtype, and of their dropout mask."""
    mask = 1 if config.attention_dropout else 0
    return _score_rows(config) * config.shape.seq_length * (4 + width_of(config) + mask)


def _score_rows(config: Config) -> float:
    return tokens_of(config) * config.shape.num_attention_heads / config.tensor_model_parallel_size
