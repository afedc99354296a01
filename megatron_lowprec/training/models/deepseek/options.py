"""Flags of multi-latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lowprec.training.options.declaration import Group, Part, arg


@dataclass(frozen=True)
class LatentAttentionOptions(Group):
    """multi-latent attention"""

    PART = Part.SHAPE
    NEEDS = "multi_latent_attention"

    multi_latent_attention: bool = arg(
        False,
        "compute keys and values (and queries, with --q-lora-rank) from a narrow latent vector of each token",
        needs="position_embedding_type=rope rotary_percent=1.0 !use_rope_scaling rope_type=rope !group_query_attention "
        "!add_qkv_bias attention_backend=auto transformer_impl=local",
    )
    q_lora_rank: int | None = arg(
        None, "width of the queries' latent; default: queries come from the whole input", least=1
    )
    kv_lora_rank: int | None = arg(None, "width of the latent of keys and values", required=True, least=1)
    qk_head_dim: int | None = arg(
        None, "channels of a head's queries and keys without positions", required=True, least=1
    )
    qk_pos_emb_head_dim: int | None = arg(
        None, "channels of a head's queries and keys that rope turns", required=True, least=1
    )
    v_head_dim: int | None = arg(None, "channels of a head's values", required=True, least=1)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(LatentAttentionOptions):
    """Latent attention with its sizes."""

    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
