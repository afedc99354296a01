"""GPT-2's config.json: LayerNorm, learned positions, the tanh approximation of GELU (``gelu_new``) and biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.hf_options import completed, differing_options
from megatron_lowprec.training.options.model_options import ModelOptions

MODEL_TYPE, TITLE = "gpt2", "GPT-2"
OPTIONS: Mapping[str, Any] = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "squared_relu": False,
    "disable_bias_linear": False,
    "group_query_attention": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "num_experts": None,
}
VARIANTS: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
ALIASES: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def differing(config: Config) -> list[str]:
    """Options that GPT-2 does not support; its heads split the hidden size."""
    found = differing_options(config, OPTIONS)
    if config.kv_channels != config.shape.hidden_size // config.shape.num_attention_heads:
        found.append(f"--kv-channels {config.kv_channels}")
    return found


def to_config(config: ModelOptions) -> dict[str, Any]:
    """Entries of config.json besides those of every architecture."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": MODEL_TYPE,
        "activation_function": "gelu_new",
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_hidden_size,
        "n_layer": config.num_layers,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "scale_attn_weights": True,
    }


def from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Config; ``resolve_model`` fills derived sizes.

    Raises:
        UserError: another dropout behind the embedding than in the residual branches.
    """
    hf = completed(hf, DEFAULTS, ALIASES)
    if hf["embd_pdrop"] != hf["resid_pdrop"]:
        raise UserError(
            f"config.json has embd_pdrop {hf['embd_pdrop']} and resid_pdrop {hf['resid_pdrop']}, and --hidden-dropout "
            "is both: give them one value there; they have no effect outside of training"
        )
    return {
        "num_layers": hf["n_layer"],
        "hidden_size": hf["n_embd"],
        "num_attention_heads": hf["n_head"],
        "ffn_hidden_size": hf["n_inner"] or 4 * hf["n_embd"],
        "seq_length": hf["n_positions"],
        "max_position_embeddings": hf["n_positions"],
        "norm_epsilon": hf["layer_norm_epsilon"],
        "hidden_dropout": hf["resid_pdrop"],
        "attention_dropout": hf["attn_pdrop"],
        "init_method_std": hf["initializer_range"],
        "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
    }
