"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention, and experts behind dense layers."""

from __future__ import annotations

from megatron_lowprec.training.models.common import mlp
from megatron_lowprec.training.models.common.interface import Architecture, HuggingFace
from megatron_lowprec.training.models.deepseek import hf_config, hf_weights, latent_attention
from megatron_lowprec.training.models.deepseek.options import LatentAttentionOptions
from megatron_lowprec.training.models.moe.architecture import MOE

DEEPSEEK = Architecture(
    name="deepseek",
    selected=lambda config: config.multi_latent_attention and bool(config.num_experts),
    attention=latent_attention,
    mlp=MOE.mlp,
    hugging_face=HuggingFace(hf_config, hf_weights),
    plans_fp8_inputs=False,
    options=(LatentAttentionOptions, *MOE.options),
)

LATENT = Architecture(
    name="dense latent attention",
    selected=lambda config: config.multi_latent_attention,
    attention=latent_attention,
    mlp=mlp,
    plans_fp8_inputs=False,
    options=(LatentAttentionOptions,),
)
