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
        False, "compute keys and values (and queries, with --q-lora-rank) from a narrow latent vector of each token"
    )
    q_lora_rank: int | None = arg(None, "width of the queries' latent; default: queries come from the whole input")
    kv_lora_rank: int | None = arg(None, "width of the latent of keys and values")
    qk_head_dim: int | None = arg(None, "channels of a head's queries and keys without positions")
    qk_pos_emb_head_dim: int | None = arg(None, "channels of a head's queries and keys that rope turns")
    v_head_dim: int | None = arg(None, "channels of a head's values")
