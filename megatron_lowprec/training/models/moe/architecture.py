"""Mixture of experts (``--num-experts``): Megatron's MoE layer with experts instead of the MLP."""

from __future__ import annotations

from megatron_lowprec.training.models.common import attention
from megatron_lowprec.training.models.common.interface import Architecture, HuggingFace
from megatron_lowprec.training.models.moe import hf_config, hf_weights, mlp
from megatron_lowprec.training.models.moe.options import MoeOptions

MOE = Architecture(
    name="moe",
    selected=lambda config: bool(config.num_experts),
    attention=attention,
    mlp=mlp,
    hugging_face=HuggingFace(hf_config, hf_weights),
    plans_fp8_inputs=False,
    options=(MoeOptions,),
)
