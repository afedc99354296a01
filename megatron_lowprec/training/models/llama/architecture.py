"""Llama: RMSNorm, rope, SwiGLU and no biases."""

from __future__ import annotations

from megatron_lowprec.training.models.common import attention, mlp
from megatron_lowprec.training.models.common.interface import Architecture, HuggingFace
from megatron_lowprec.training.models.llama import hf_config, hf_weights

LLAMA = Architecture(
    name="llama",
    selected=lambda config: not hf_config.differing(config),
    attention=attention,
    mlp=mlp,
    hugging_face=HuggingFace(hf_config, hf_weights),
)
