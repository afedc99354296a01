"""Llama: RMSNorm, rope, SwiGLU and no biases; Qwen2 has biases of queries, keys and values, Qwen3 norms of heads."""

from __future__ import annotations

from megatron_lowprec.training.models.common import attention, mlp
from megatron_lowprec.training.models.common.interface import Architecture, HuggingFace
from megatron_lowprec.training.models.llama import hf_config, hf_weights
from megatron_lowprec.training.models.llama.relatives import MISTRAL, QWEN2, QWEN3, Relative

LLAMA = Architecture(
    name="llama",
    selected=lambda config: not hf_config.differing(config),
    attention=attention,
    mlp=mlp,
    hugging_face=HuggingFace(hf_config, hf_weights),
    also_read=(HuggingFace(MISTRAL, hf_weights),),
)


def _relative(form: Relative) -> Architecture:
    return Architecture(
        name=form.MODEL_TYPE,
        selected=lambda config: not form.differing(config),
        attention=attention,
        mlp=mlp,
        hugging_face=HuggingFace(form, hf_weights),
    )


RELATIVES = (_relative(QWEN2), _relative(QWEN3))
