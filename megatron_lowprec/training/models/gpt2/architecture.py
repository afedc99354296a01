"""GPT-2: LayerNorm, learned positions, GELU and biases; also any other dense combination of the model options."""

from __future__ import annotations

from megatron_lowprec.training.models.common import attention, mlp
from megatron_lowprec.training.models.common.interface import Architecture
from megatron_lowprec.training.models.gpt2 import hugging_face

GPT2 = Architecture(
    name="gpt2",
    selected=lambda config: True,
    attention=attention,
    mlp=mlp,
    hugging_face=hugging_face.GPT2,
)
