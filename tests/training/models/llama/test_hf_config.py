"""Variants of Llama that these layers do not have."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.convert.hf_config import from_hf_config


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4096}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},  # without its factor
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
    ],
)
def test_variants_of_llama_are_refused(change: dict[str, Any]) -> None:
    about: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    about |= {"intermediate_size": 8, "max_position_embeddings": 8, "vocab_size": 9}
    assert (
        from_hf_config(about | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})["rotary_base"] == 77
    )
    with pytest.raises(UserError, match=next(iter(change)).split("_")[0]):
        from_hf_config(about | change)
