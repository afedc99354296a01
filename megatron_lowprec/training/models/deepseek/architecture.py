"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention, and experts behind dense layers."""

from __future__ import annotations

from megatron_lowprec.training.models.common import experts, mlp
from megatron_lowprec.training.models.common.interface import Architecture
from megatron_lowprec.training.models.deepseek import latent_attention
from megatron_lowprec.training.models.deepseek.hugging_face import DEEPSEEK_V3
from megatron_lowprec.training.models.deepseek.options import LatentAttentionOptions
from megatron_lowprec.training.options.moe_options import MoeOptions

DEEPSEEK = Architecture(
    name="deepseek",
    selected=lambda config: config.multi_latent_attention and bool(config.num_experts),
    attention=latent_attention,
    mlp=experts,
    hugging_face=DEEPSEEK_V3,
    plans_fp8_inputs=False,
    options=(LatentAttentionOptions, MoeOptions),
)

LATENT = Architecture(
    name="dense latent attention",
    selected=lambda config: config.multi_latent_attention,
    attention=latent_attention,
    mlp=mlp,
    plans_fp8_inputs=False,
    options=(LatentAttentionOptions,),
)
