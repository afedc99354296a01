"""Layer specs of a GPT: Megatron-core's local spec with this project's linears, norms and attention."""

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.layers.attention import SdpaAttention
from megatron_lowprec.mcore.layers.bias_dropout_add import get_bias_dropout_add
from megatron_lowprec.mcore.layers.mlp import LowPrecMLP
from megatron_lowprec.mcore.layers.norm import Norm
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear, LowPrecRowParallelLinear
from megatron_lowprec.mcore.layers.self_attention import LowPrecSelfAttention


class LowPrecSpecProvider(LocalSpecProvider):
    """Megatron-core's backend protocol, implemented with this project's modules.

    Args:
        attention_backend: ``"auto"`` is torch's scaled_dot_product_attention, ``"local"`` Megatron-core's unfused
            attention.
        no_lowprec_linears: use Megatron-core's own linear layers, which ignore the recipe (for comparisons).
    """

    def __init__(self, attention_backend: str = "auto", no_lowprec_linears: bool = False) -> None:
        attentions = {"auto": SdpaAttention, "local": DotProductAttention}
        if attention_backend not in attentions:
            raise UserError(f"--attention-backend {attention_backend} is not available; use {' or '.join(attentions)}")
        self._attention = attentions[attention_backend]
        self._stock_linears = no_lowprec_linears

    def column_parallel_linear(self) -> type:
        """Class of linear_qkv and linear_fc1."""
        return super().column_parallel_linear() if self._stock_linears else LowPrecColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Class of linear_proj and linear_fc2."""
        return super().row_parallel_linear() if self._stock_linears else LowPrecRowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Class of all norms."""
        return Norm

    def core_attention(self) -> type:
        """Class of the core attention."""
        return self._attention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        """Experts run one after the other, through this project's linears."""
        if moe_use_grouped_gemm:
            raise UserError(
                "--moe-grouped-gemm has no low-precision path; leave it out, experts then run one after the other"
            )
        return SequentialMLP, MLPSubmodules(
            linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear()
        )


# Config fields that select unsupported layers or numerics if set to anything but None or False.
_REFUSED = {
    "multi_latent_attention": "multi-latent attention",
    "experimental_attention_variant": "an experimental attention variant",
    "heterogeneous_block_specs": "layers of different architectures",
    "mtp_num_layers": "multi-token prediction",
    "use_kitchen": "layers of Kitchen",
    "use_kitchen_attention": "attention of Kitchen",
    "quant_recipe": "a quantization of single modules by Megatron-core",
    "fp8": "FP8 layers of TransformerEngine",
    "fp4": "FP4 layers of TransformerEngine",
}


def gpt_block_spec(
    config: TransformerConfig,
    *,
    attention_backend: str = "auto",
    no_lowprec_linears: bool = False,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Layer specs of this pipeline stage for ``GPTModel``: Megatron-core's local ones with this project's modules.

    Raises:
        UserError: ``config`` selects layers that have no low-precision path.
    """
    for field, what in _REFUSED.items():
        value = getattr(config, field, None)
        if value:
            raise UserError(
                f"TransformerConfig.{field} is {value!r}, but gpt_block_spec has no {what}: leave it at its default"
            )
    provider = LowPrecSpecProvider(attention_backend, no_lowprec_linears)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    for layer in {id(spec): spec.submodules for spec in block.layer_specs}.values():  # layers share specs
        _replace_parts(layer, config, provider)
    block.layer_norm = provider.layer_norm()
    return block


def _replace_parts(layer: TransformerLayerSubmodules, config: TransformerConfig, provider: LowPrecSpecProvider) -> None:
    """Replace the backend-dependent parts of a layer, dense or with experts, by ``provider``'s."""
    layer.input_layernorm = layer.pre_mlp_layernorm = provider.layer_norm()
    layer.self_attention.module = LowPrecSelfAttention
    attention = layer.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = provider.column_parallel_linear(), provider.row_parallel_linear()
    attention.core_attention = provider.core_attention()
    if config.qk_layernorm and not config.qk_l2_norm:
        attention.q_layernorm = attention.k_layernorm = provider.layer_norm(for_qk=True)
    mlp = get_mlp_module_spec_for_backend(
        provider,
        num_experts=None if layer.mlp.module is MLP else config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    layer.mlp = LowPrecMLP.of(mlp.submodules) if mlp.module is MLP else mlp
    layer.self_attn_bda = layer.mlp_bda = get_bias_dropout_add
