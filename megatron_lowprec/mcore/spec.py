"""How a GPT's transformer layers are put together: Megatron-core's local spec with our linears, norms and attention."""

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec_for_backend
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.attention import SdpaAttention
from megatron_lowprec.mcore.bias_dropout_add import get_bias_dropout_add
from megatron_lowprec.mcore.mlp import LowPrecMLP
from megatron_lowprec.mcore.norm import Norm
from megatron_lowprec.mcore.parallel_linear import LowPrecColumnParallelLinear, LowPrecRowParallelLinear
from megatron_lowprec.mcore.self_attention import LowPrecSelfAttention


class LowPrecSpecProvider(LocalSpecProvider):
    """Megatron-core's backend protocol, answered with this project's modules.

    Args:
        attention_backend: ``"auto"`` is torch's scaled_dot_product_attention, ``"local"`` Megatron-core's unfused
            attention.
        stock_linears: keep Megatron-core's own linear layers, which know no recipe (for comparisons).
    """

    def __init__(self, attention_backend: str = "auto", stock_linears: bool = False) -> None:
        attentions = {"auto": SdpaAttention, "local": DotProductAttention}
        if attention_backend not in attentions:
            raise UserError(f"--attention-backend {attention_backend} is not available; use {' or '.join(attentions)}")
        self._attention = attentions[attention_backend]
        self._stock_linears = stock_linears

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
        """Class of the attention products."""
        return self._attention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules | None]:
        """Experts one after the other, through our linears."""
        if moe_use_grouped_gemm:
            raise UserError(
                "--moe-grouped-gemm has no low-precision path; leave it out, experts then run one after the other"
            )
        return SequentialMLP, MLPSubmodules(
            linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear()
        )


def gpt_block_spec(
    config: TransformerConfig,
    *,
    attention_backend: str = "auto",
    stock_linears: bool = False,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Layer specs of this pipeline stage for ``GPTModel``.

    ``get_gpt_layer_local_spec`` takes no backend, so its result is taken and the parts that a backend would choose
    are replaced.
    """
    provider = LowPrecSpecProvider(attention_backend, stock_linears)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = provider.layer_norm()
    layer.self_attention.module = LowPrecSelfAttention
    attention = layer.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = provider.column_parallel_linear(), provider.row_parallel_linear()
    attention.core_attention = provider.core_attention()
    mlp = get_mlp_module_spec_for_backend(provider, num_experts=config.num_moe_experts)
    layer.self_attn_bda = layer.mlp_bda = get_bias_dropout_add
    layer.mlp = LowPrecMLP.of(mlp.submodules) if mlp.module is MLP else mlp
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=provider.layer_norm())
