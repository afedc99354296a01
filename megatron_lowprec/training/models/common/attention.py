"""Megatron's self-attention: grouped heads that share keys and values, learned positions or rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.fields import check_divisible
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.models.common.rank_sizes import stream_entries, tokens_of, width_of
from megatron_lowprec.training.models.common.saved_tensor import SavedTensor
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
    channels = config.kv_channels or hidden // heads
    turned = int(channels * config.rotary_percent)
    if config.position_embedding_type == "rope" and turned + turned % 2 > channels:
        raise UserError(
            f"rope turns pairs of channels, and a head has {channels} (--kv-channels, else --hidden-size over "
            "--num-attention-heads): give an even number"
        )
    return replace(
        config,
        kv_channels=channels,
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


def activations(config: Config, layer: int) -> list[SavedTensor]:
    """Inputs of both linear layers; queries, keys and values as they are computed, and as core attention takes them."""
    tokens, tensor = tokens_of(config), config.tensor_model_parallel_size
    heads, channels = config.shape.num_attention_heads, config.shape.kv_channels
    query = tokens * heads * channels / tensor
    key_value = tokens * config.num_query_groups * channels / tensor
    turned, grouped = config.position_embedding_type == "rope", config.num_query_groups < heads
    by_kernel = turned and config.rope_type == "rope"
    saved = [
        SavedTensor(
            "input of linear_qkv", stream_entries(config), input_of="self_attention.linear_qkv", behind_norm=True
        ),
        SavedTensor("values", key_value),
        SavedTensor("queries and keys in the output of linear_qkv", query + key_value, unfused=by_kernel),
        output(query),
    ]
    if turned or grouped:
        saved.append(SavedTensor("queries and keys on their own", query + (key_value if turned else 0)))
    if config.qk_layernorm:
        saved.append(SavedTensor("inputs of the norms of queries and keys", query + key_value))
    if turned:  # for queries and keys; a kernel rotates by the plain rope
        entries = 4 * config.shape.seq_length * int(channels * config.rotary_percent)
        saved.append(SavedTensor("cosines and sines", entries, unfused=by_kernel))
    return saved + core_attention(config)


def output(entries: float) -> SavedTensor:
    """Output of core attention, which saves it as well as linear_proj."""
    name = "input of linear_proj (output of attention)"
    return SavedTensor(
        name,
        entries,
        input_of="self_attention.linear_proj",
        also_output=True,
        activation="attention_output",
        in_format=f"{name} in {{}}",
    )


def recomputed_bytes(config: Config) -> float:
    """Bytes of the scores, which only Megatron-core's unfused attention stores."""
    if config.attention_backend != "local":
        return 0.0
    scores = _scores(config)
    return scores.entries * scores.width


def score_channels(config: Config) -> float:
    """Channels of all heads."""
    return config.shape.kv_channels * config.shape.num_attention_heads


def core_attention(config: Config) -> list[SavedTensor]:
    """Tensors that core attention saves besides its inputs and output; scaled_dot_product_attention saves no scores."""
    if config.recompute_granularity == "selective":
        return []
    if config.attention_backend == "local":
        return [_scores(config)]
    return [SavedTensor("log-sum-exp of attention", _score_rows(config), width=4)]


def _scores(config: Config) -> SavedTensor:
    """Attention probabilities in fp32 and in the compute dtype, and their dropout mask."""
    mask = 1 if config.attention_dropout else 0
    entries = _score_rows(config) * config.shape.seq_length
    return SavedTensor("scores of attention", entries, width=4 + width_of(config) + mask)


def _score_rows(config: Config) -> float:
    return tokens_of(config) * config.shape.num_attention_heads / config.tensor_model_parallel_size
