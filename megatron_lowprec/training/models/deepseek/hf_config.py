"""DeepSeek-V3's config.json: latent attention, sigmoid scores with a balancing bias, dense layers before experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.hf_options import completed, differing_options
from megatron_lowprec.training.models.common.rope import plain_base
from megatron_lowprec.training.models.moe.layer_pattern import layers_with_experts

MODEL_TYPE, TITLE = "deepseek_v3", "DeepSeek-V3"
OPTIONS: Mapping[str, Any] = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,  # Hugging Face's norms of the latents have no other
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "disable_bias_linear": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
VARIANTS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "norm_topk_prob": (True,),
    "rope_interleave": (True,),
    "rms_norm_eps": (1e-6,),
    "num_nextn_predict_layers": (0,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": None,  # that of the heads; transformers' 128 is for its own 128 heads
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
ALIASES: Mapping[str, str] = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_BEST_OF_A_GROUP = 2  # scores whose sum ranks a group


def differing(config: Config) -> list[str]:
    """Options that DeepSeek-V3 does not support."""
    found = differing_options(config, OPTIONS)
    if not config.num_experts or config.num_layers is None:
        return [*found, "a dense MLP in all layers"]
    if _dense_layers(config) is None:
        found.append(f"--moe-layer-freq {config.moe_layer_freq}")
    shared, width = config.moe_shared_expert_intermediate_size or 0, config.moe_ffn_hidden_size or 1
    if not shared or shared % width:
        found.append(f"--moe-shared-expert-intermediate-size {shared}")
    best = config.moe_router_topk // config.moe_router_group_topk if config.moe_router_group_topk else _BEST_OF_A_GROUP
    if config.moe_router_topk < 2 or best != _BEST_OF_A_GROUP:
        found.append(f"--moe-router-topk {config.moe_router_topk}")
    return found


def _dense_layers(config: Config) -> int | None:
    """Number of dense layers, None if experts come before one."""
    pattern = layers_with_experts(config)
    dense = pattern.index(True)
    return dense if all(pattern[dense:]) else None


def to_config(config: Config) -> dict[str, Any]:
    """Entries of config.json besides those of every architecture."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": MODEL_TYPE,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "first_k_dense_replace": _dense_layers(config),
        "num_nextn_predict_layers": 0,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_head_dim,
        "qk_rope_head_dim": config.qk_pos_emb_head_dim,
        "v_head_dim": config.v_head_dim,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.experts.moe_ffn_hidden_size,
        "num_experts_per_tok": config.moe_router_topk,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": float(config.rotary_base),
        "rope_interleave": True,
        "attention_bias": False,
        "attention_dropout": config.attention_dropout,
    }


def from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Config; ``resolve_model`` fills derived sizes.

    Raises:
        UserError: another number of keys and values than of queries.
    """
    hf = completed(hf, DEFAULTS, ALIASES)
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    if groups not in (None, heads):
        raise UserError(f"config.json has num_key_value_heads {groups}; latent attention has one for each of {heads}")
    dense, layers = hf["first_k_dense_replace"], hf["num_hidden_layers"]
    grouped = hf["n_group"] > 1
    return {
        "num_layers": layers,
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_experts": hf["n_routed_experts"],
        "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})" if dense else "1",
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_num_groups": hf["n_group"] if grouped else None,
        "moe_router_group_topk": hf["topk_group"] if grouped else None,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_dtype": "fp32",
        "seq_length": hf["max_position_embeddings"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "rotary_base": plain_base(hf),
        "hidden_dropout": 0.0,
        "attention_dropout": hf["attention_dropout"],
        "init_method_std": hf["initializer_range"],
        "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
    }
