"""Variants of GPT-2 that these layers do not have."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lowprec.training.convert.hf_config import from_hf_config
from tests.refusal import refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "opt"}, "'opt' model"),
        ({"activation_function": "gelu"}, "activation_function 'gelu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_variants_of_gpt2_are_refused(change: dict[str, Any], words: str) -> None:
    about = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "n_positions": 8, "vocab_size": 9}
    from_hf_config(about)
    with refused(words):
        from_hf_config(about | change)
