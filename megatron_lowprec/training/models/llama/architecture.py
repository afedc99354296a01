"""Llama and its dense relatives, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.training.models.common import llama_like
from megatron_lowprec.training.models.common.llama_like import dense, relative


def _within_window(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model with a window, which a sequence of at most that length does not see."""
    longest, window = hf["max_position_embeddings"], hf["sliding_window"]
    longest = longest if window is None else min(longest, window)
    return llama_like.from_config(hf) | {"seq_length": longest, "max_position_embeddings": longest}


_NO_WINDOW = {"use_sliding_window": (False,)}
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_MISTRAL = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

MISTRAL = relative("Mistral", defaults=_MISTRAL, from_config=_within_window)
LLAMA = dense(llama_like.LLAMA, MISTRAL)
QWEN2 = dense(relative("Qwen2", options={"add_qkv_bias": True}, variants=_NO_WINDOW, defaults=_QWEN))
QWEN3 = dense(
    relative(
        "Qwen3",
        options={"qk_layernorm": True},
        variants={**_NO_WINDOW, "attention_bias": (False,)},
        defaults={**_QWEN, "head_dim": 128},
    )
)
