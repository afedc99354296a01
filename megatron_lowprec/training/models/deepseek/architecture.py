"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention, and experts behind dense layers."""

from __future__ import annotations

from dataclasses import fields

from megatron_lowprec.training.models.common import mlp
from megatron_lowprec.training.models.common.interface import Architecture, HuggingFace
from megatron_lowprec.training.models.deepseek import hf_config, hf_weights, latent_attention
from megatron_lowprec.training.models.deepseek.options import LatentAttentionOptions
from megatron_lowprec.training.models.moe.architecture import MOE

_SIZES = tuple(option.name for option in fields(LatentAttentionOptions) if option.name != "multi_latent_attention")

DEEPSEEK = Architecture(
    name="deepseek",
    selected=lambda config: config.multi_latent_attention and bool(config.num_experts),
    attention=latent_attention,
    mlp=MOE.mlp,
    hugging_face=HuggingFace(hf_config, hf_weights),
    plans_fp8_inputs=False,
    shape_options=("multi_latent_attention", *_SIZES, *MOE.shape_options),
    function_options=MOE.function_options,
    dependent_options={"multi_latent_attention": _SIZES},
)

LATENT = Architecture(
    name="dense latent attention",
    selected=lambda config: config.multi_latent_attention,
    attention=latent_attention,
    mlp=mlp,
    plans_fp8_inputs=False,
    shape_options=("multi_latent_attention", *_SIZES),
)
