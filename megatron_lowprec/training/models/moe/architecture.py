"""Mixture of experts (``--num-experts``): Megatron's MoE layer with experts instead of the MLP."""

from __future__ import annotations

from dataclasses import fields

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
    shape_options=("num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
    function_options=(
        *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_router_dtype"),
    ),
    dependent_options={
        "num_experts": tuple(option.name for option in fields(MoeOptions) if option.name != "num_experts")
    },
    bounds={"moe_router_topk": (1, None), "moe_router_num_groups": (1, None), "moe_router_group_topk": (1, None)},
)
