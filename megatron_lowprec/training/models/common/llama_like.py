"""Llama, and an architecture for each dense relative of it: RMSNorm, rope, SwiGLU and no biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_lowprec.training.models.common import attention, mlp, rope
from megatron_lowprec.training.models.common.hugging_face import HuggingFace
from megatron_lowprec.training.models.common.interface import Architecture
from megatron_lowprec.training.models.common.llama_tensors import known_name, tensor_maps

# Shared with Llama's relatives that have experts or another attention.
OPTIONS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "disable_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
}
KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "attention_dropout": "attention_dropout",
}
ACTIVATION = {"hidden_act": ("silu", "swish")}
_NO_OTHERS: Mapping[str, Any] = {}


def from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of grouped queries, rope and the residual stream."""
    heads = hf["num_attention_heads"]
    groups = hf["num_key_value_heads"] or heads
    grouped = {"group_query_attention": groups != heads, "num_query_groups": groups}
    return {**grouped, **rope.from_config(hf), "hidden_dropout": 0.0}


LLAMA = HuggingFace(
    model_type="llama",
    title="Llama",
    class_name="LlamaForCausalLM",
    options={**OPTIONS, "num_experts": None},
    keys={
        **KEYS,
        "num_query_groups": "num_key_value_heads",
        "kv_channels": "head_dim",
        "norm_epsilon": "rms_norm_eps",
    },
    variants={**ACTIVATION, "attention_bias": (False,), "mlp_bias": (False,)},
    defaults={
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
    },
    tensor_maps=tensor_maps,
    known_name=known_name,
    to_config=rope.to_config,
    from_config=from_config,
)


def relative(
    title: str,
    *,
    options: Mapping[str, Any] = _NO_OTHERS,
    variants: Mapping[str, tuple[Any, ...]] = _NO_OTHERS,
    defaults: Mapping[str, Any] = _NO_OTHERS,
    **others: Any,
) -> HuggingFace:
    """A dense model by its differences from Llama.

    Args:
        variants: in place of Llama's ``attention_bias`` and ``mlp_bias``.
        others: fields of ``HuggingFace``, in place of Llama's.
    """
    return replace(
        LLAMA,
        **{"model_type": title.lower(), "title": title, "class_name": f"{title}ForCausalLM"} | others,
        options={**LLAMA.options, **options},
        variants={**ACTIVATION, **variants},
        defaults={**LLAMA.defaults, **defaults},
    )


def dense(form: HuggingFace, *also_read: HuggingFace) -> Architecture:
    """The architecture of models in Llama's layers with the options of ``form``."""
    return Architecture(
        name=form.model_type,
        selected=lambda config: not form.differing(config),
        attention=attention,
        mlp=mlp,
        hugging_face=form,
        also_read=also_read,
    )
