"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and values from narrow latents.

One key of ``qk_pos_emb_head_dim`` channels per token has the position, shared by all heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.fields import check_divisible
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common import attention
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.models.common.rank_sizes import sequence_ranks, stream_entries, tokens_of
from megatron_lowprec.training.models.common.saved_tensor import SavedTensor

recomputed_bytes = attention.recomputed_bytes


def resolve(config: Config) -> Config:
    """The options with --kv-channels and --num-query-groups filled, which Megatron-core reads."""
    check_divisible("--qk-pos-emb-head-dim", config.latent.qk_pos_emb_head_dim, "the pairs of rope,", 2)
    return replace(config, kv_channels=config.v_head_dim, num_query_groups=config.sizes.num_attention_heads)


def check_parallelism(config: Config, data_parallel_size: int) -> None:
    """Reject a tensor-parallel size that does not divide heads and latents."""
    tensor = config.tensor_model_parallel_size
    if tensor > 1 and not config.sequence_parallel:
        raise UserError(
            f"--multi-latent-attention with --tensor-model-parallel-size {tensor} needs --sequence-parallel; add it"
        )
    check_divisible("--num-attention-heads", config.shape.num_attention_heads, "--tensor-model-parallel-size", tensor)
    check_divisible("--q-lora-rank", config.q_lora_rank or 0, "--tensor-model-parallel-size", tensor)
    latent = config.latent.kv_lora_rank + config.latent.qk_pos_emb_head_dim
    check_divisible("--kv-lora-rank + --qk-pos-emb-head-dim", latent, "--tensor-model-parallel-size", tensor)


def transformer_fields(config: Config) -> dict[str, Any]:
    """Fields of Megatron-core's MLATransformerConfig."""
    return attention.transformer_fields(config) | {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.latent.kv_lora_rank,
        "qk_head_dim": config.latent.qk_head_dim,
        "qk_pos_emb_head_dim": config.latent.qk_pos_emb_head_dim,
        "v_head_dim": config.latent.v_head_dim,
        "rope_type": "rope",
        "rotary_base": config.rotary_base,
        # of YaRN: the scale of the scores has a factor for it
        "rotary_scaling_factor": 1.0,
    }


def linear_sites(config: Config, layer: int) -> tuple[LinearSite, ...]:
    """Projections down to the latents, up to the heads, and linear_proj."""
    hidden, heads = config.shape.hidden_size, config.shape.num_attention_heads
    latent, turned = config.latent.kv_lora_rank, config.latent.qk_pos_emb_head_dim
    channels, values = config.latent.qk_head_dim, config.latent.v_head_dim
    query = heads * (channels + turned)
    sizes = {
        "linear_kv_down_proj": (hidden, latent + turned),
        "linear_kv_up_proj": (latent, heads * (channels + values)),
    }
    if config.q_lora_rank is None:
        sizes = {**sizes, "linear_q_proj": (hidden, query)}
    else:
        sizes = {
            "linear_q_down_proj": (hidden, config.q_lora_rank),
            **sizes,
            "linear_q_up_proj": (config.q_lora_rank, query),
        }
    order = ("linear_q_down_proj", "linear_kv_down_proj", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
    return (
        *(LinearSite(layer, f"self_attention.{name}", *sizes[name], "column") for name in order if name in sizes),
        LinearSite(layer, "self_attention.linear_proj", heads * values, hidden, "row"),
    )


def sharding(config: Config, site: LinearSite) -> Sharding:
    """One copy, sharded over all tensor-parallel ranks."""
    return attention.sharding(config, site)


def other_weights(config: Config, layer: int) -> int:
    """Weights of the latents' norms."""
    latents = (config.q_lora_rank or 0) + config.latent.kv_lora_rank
    return latents * (2 if config.normalization == "LayerNorm" else 1) if config.qk_layernorm else 0


def activations(config: Config, layer: int) -> list[SavedTensor]:
    """Each latent before and after its norm, whole on each rank before it is split again, and what attention takes."""
    tokens, heads = tokens_of(config), config.shape.num_attention_heads / config.tensor_model_parallel_size
    turned, values = config.latent.qk_pos_emb_head_dim, tokens * heads * config.latent.v_head_dim
    latents = (config.q_lora_rank or 0) + config.latent.kv_lora_rank
    token = tokens / sequence_ranks(config)
    saved = [
        SavedTensor("input of the projections down", stream_entries(config)),
        SavedTensor("latents", token * (latents + turned)),
        SavedTensor("queries and keys", 2 * tokens * heads * (config.latent.qk_head_dim + turned)),
        SavedTensor("values", values),
        attention.output(values),
        SavedTensor("cosines and sines", 4 * config.shape.seq_length * turned),
    ]
    if config.qk_layernorm:
        saved.append(SavedTensor("inputs of the projections up", token * latents))
    return saved + attention.core_attention(config)


def score_channels(config: Config) -> float:
    """Mean of the channels of a query and of a value, over all heads."""
    query = config.latent.qk_head_dim + config.latent.qk_pos_emb_head_dim
    return config.shape.num_attention_heads * (query + config.latent.v_head_dim) / 2
