"""A GPT's options as the config.json of Hugging Face's GPT-2 or Llama, and back. Pure data.

GPT-2 is LayerNorm, learned positions, GELU (the tanh approximation, ``gelu_new``) and biases; Llama is RMSNorm, rope,
SwiGLU and none. Anything between the two has no such model and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.sizes import require

# What makes a model of each kind; the rest of a Config is sizes.
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "swiglu": False,
        "squared_relu": False,
        "disable_bias_linear": False,
        "group_query_attention": False,
        "num_experts": None,
    },
    "llama": {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": False,
        "num_experts": None,
    },
}


def kind_of(config: Config) -> str:
    """``"gpt2"`` or ``"llama"``.

    Raises:
        UserError: neither; it names what differs from the nearer of the two.
    """
    differing = {
        kind: [
            f"--{name.replace('_', '-')} {getattr(config, name)}"
            for name, value in asked.items()
            if getattr(config, name) != value
        ]
        for kind, asked in _KINDS.items()
    }
    if config.kv_channels != require(config.hidden_size) // require(config.num_attention_heads):
        differing["gpt2"].append(f"--kv-channels {config.kv_channels}")
    kind = min(differing, key=lambda name: len(differing[name]))
    if differing[kind]:
        raise UserError(
            f"this model is neither a GPT-2 nor a Llama to Hugging Face: {', '.join(differing[kind])} is not "
            f"{kind}'s; only those two can be written"
        )
    return kind


def to_hf_config(config: Config, vocab_size: int, eod: int | None, dtype: str) -> dict[str, Any]:
    """config.json; ``vocab_size`` without padding."""
    common = {
        "vocab_size": vocab_size,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if kind_of(config) == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
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
            **common,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": float(config.rotary_base),
        "attention_bias": False,
        "attention_dropout": config.attention_dropout,
        "mlp_bias": False,
        **common,
    }


def from_hf_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Config; sizes that follow from others are left to ``resolve_model``.

    Raises:
        UserError: another architecture than GPT-2 or Llama, or a variant of one that Megatron's layers do not have.
    """
    kind = str(hf.get("model_type"))
    if kind not in _KINDS:
        raise UserError(f"config.json is of a {kind!r} model; gpt2 and llama can be read")
    _refuse_variants(kind, hf)
    options = {name: value for name, value in _KINDS[kind].items() if value is not None}
    if kind == "gpt2":
        return options | {
            "num_layers": hf["n_layer"],
            "hidden_size": hf["n_embd"],
            "num_attention_heads": hf["n_head"],
            "ffn_hidden_size": hf.get("n_inner") or 4 * hf["n_embd"],
            "seq_length": hf["n_positions"],
            "max_position_embeddings": hf["n_positions"],
            "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
            "hidden_dropout": hf.get("resid_pdrop", 0.1),
            "attention_dropout": hf.get("attn_pdrop", 0.1),
            "init_method_std": hf.get("initializer_range", 0.02),
            "untie_embeddings_and_output_weights": not hf.get("tie_word_embeddings", True),
        }
    heads = hf["num_attention_heads"]
    groups = hf.get("num_key_value_heads") or heads
    return options | {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "ffn_hidden_size": hf["intermediate_size"],
        "seq_length": hf["max_position_embeddings"],
        "max_position_embeddings": hf["max_position_embeddings"],
        "rotary_base": int(_rope(hf).get("rope_theta", 10000)),
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "hidden_dropout": 0.0,
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not hf.get("tie_word_embeddings", False),
    }


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope's options: transformers 5 has them in a dictionary of their own."""
    return hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta", 10000)}


_ONLY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_scaling": (None,),
    },
}


def _refuse_variants(kind: str, hf: Mapping[str, Any]) -> None:
    for name, allowed in _ONLY[kind].items():
        if hf.get(name, allowed[0]) not in allowed:
            raise UserError(
                f"config.json has {name} {hf[name]!r}, which these layers have not: it must be {allowed[0]!r}"
            )
    if kind == "llama" and _rope(hf).get("rope_type", "default") != "default":
        raise UserError(f"config.json has rope of type {_rope(hf)['rope_type']!r}; only the plain one can be read")
