"""Mixture of experts (``--num-experts``): Megatron's MoE layer with experts instead of the MLP."""

from __future__ import annotations

from megatron_lowprec.training.models.common import attention, experts
from megatron_lowprec.training.models.common.interface import Architecture
from megatron_lowprec.training.models.moe.hugging_face import MIXTRAL
from megatron_lowprec.training.options.moe_options import MoeOptions

MOE = Architecture(
    name="moe",
    selected=lambda config: bool(config.num_experts),
    attention=attention,
    mlp=experts,
    hugging_face=MIXTRAL,
    plans_fp8_inputs=False,
    options=(MoeOptions,),
)
