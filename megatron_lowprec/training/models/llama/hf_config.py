"""Llama's config.json: RMSNorm, rope, SwiGLU and no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common import rope
from megatron_lowprec.training.models.common.hf_options import completed, differing_options

MODEL_TYPE, TITLE = "llama", "Llama"
OPTIONS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "disable_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "num_experts": None,
}
VARIANTS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
ALIASES: Mapping[str, str] = {}


def differing(config: Config) -> list[str]:
    """Options that Llama does not support."""
    return differing_options(config, OPTIONS)


def to_config(config: Config) -> dict[str, Any]:
    """Entries of config.json besides those of every architecture."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        **rope.to_config(config),
        "attention_bias": False,
        "attention_dropout": config.attention_dropout,
        "mlp_bias": False,
    }


def from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Config; ``resolve_model`` fills derived sizes."""
    hf = completed(hf, DEFAULTS, ALIASES)
    heads = hf["num_attention_heads"]
    groups = hf["num_key_value_heads"] or heads
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": hf["head_dim"],
        "ffn_hidden_size": hf["intermediate_size"],
        "seq_length": hf["max_position_embeddings"],
        "max_position_embeddings": hf["max_position_embeddings"],
        **rope.from_config(hf),
        "norm_epsilon": hf["rms_norm_eps"],
        "hidden_dropout": 0.0,
        "attention_dropout": hf["attention_dropout"],
        "init_method_std": hf["initializer_range"],
        "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
    }
