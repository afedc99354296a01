"""Layer specs of a GPT: Megatron-core's local specs with this project's linears, norms and attention."""

from collections.abc import Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as stock_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore import patches
from megatron_lowprec.mcore.layers.attention import MaskedSdpaAttention, SdpaAttention
from megatron_lowprec.mcore.layers.bias_dropout_add import get_bias_dropout_add
from megatron_lowprec.mcore.layers.cached_swiglu import CachedSwigluSharedExperts
from megatron_lowprec.mcore.layers.grouped_mlp import LowPrecGroupedMLP
from megatron_lowprec.mcore.layers.latent_projection import DownProjection, LowPrecDownProjection
from megatron_lowprec.mcore.layers.mlp import LowPrecMLP
from megatron_lowprec.mcore.layers.norm import Norm
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecColumnParallelLinear, LowPrecRowParallelLinear
from megatron_lowprec.mcore.layers.self_attention import LowPrecSelfAttention
from megatron_lowprec.mcore.layers.sequential_mlp import LowPrecSequentialMLP
from megatron_lowprec.mcore.releases import GROUPED_EXPERTS, SHARED_EXPERTS

_LOWPREC = {
    ColumnParallelLinear: LowPrecColumnParallelLinear,
    RowParallelLinear: LowPrecRowParallelLinear,
    DownProjection: LowPrecDownProjection,
    SequentialMLP: LowPrecSequentialMLP,
    SHARED_EXPERTS: CachedSwigluSharedExperts,
    SharedExpertMLP: CachedSwigluSharedExperts,
}
_OTHERS: dict[Any, Any] = {
    SelfAttention: LowPrecSelfAttention,
    stock_bias_dropout_add: get_bias_dropout_add,
    WrappedTorchNorm: Norm,
    LocalSpecProvider().layer_norm(): Norm,  # apex's, where it is installed
}
_ATTENTIONS = {"auto": SdpaAttention, "masked": MaskedSdpaAttention, "local": DotProductAttention}

# Config fields that select unsupported layers or numerics if set to anything but None or False.
_REFUSED = {
    "experimental_attention_variant": "an experimental attention variant",
    "heterogeneous_block_specs": "layers of different architectures",
    "mtp_num_layers": "multi-token prediction",
    # from 0.18 or 0.19 on
    "use_mup": "maximal update parametrization",
    "fused_residual_rmsnorm": "a norm fused with the residual",
    "mla_down_proj_fusion": "a fused projection of latent attention",
    "moe_mlp_glu_interleave_size": "interleaved gates of experts",
    "moe_shared_expert_glu_interleave_size": "interleaved gates of shared experts",
    "use_grouped_gemm_for_dense_mlp": "a fused MLP of TransformerEngine",
    "use_grouped_gemm_for_shared_expert": "fused shared experts of TransformerEngine",
    "use_kitchen": "layers of Kitchen",
    "use_kitchen_attention": "attention of Kitchen",
    "quant_recipe": "a quantization of single modules by Megatron-core",
    "fp8": "FP8 layers of TransformerEngine",
    "fp4": "FP4 layers of TransformerEngine",
}
_STOCK_GROUPED_GEMM = (
    "--no-lowprec-linears keeps Megatron-core's linear layers, which have no grouped GEMMs here; leave it or "
    "--moe-grouped-gemm out"
)


def low_precision(
    spec: Any, *, attention_backend: str = "auto", no_lowprec_linears: bool = False, moe_grouped_gemm: bool = False
) -> Any:
    """A local spec of Megatron-core with its modules replaced by this project's, however it nests them.

    Args:
        spec: a ``ModuleSpec``, submodules, or a list of them.
        attention_backend: ``"auto"`` is torch's scaled_dot_product_attention, ``"masked"`` the same with the mask that
            the model gets, ``"local"`` Megatron-core's unfused attention.
        no_lowprec_linears: keep Megatron-core's own linear layers, which ignore the recipe (for comparisons).
        moe_grouped_gemm: run the experts of a layer in one call per GEMM, also those that the spec runs one after the
            other. Megatron-core's grouped experts become this project's without it.

    Raises:
        UserError: an unknown attention backend, or grouped GEMMs of Megatron-core's own linear layers.
    """
    if attention_backend not in _ATTENTIONS:
        raise UserError(f"--attention-backend {attention_backend} is not available; use {' or '.join(_ATTENTIONS)}")
    if no_lowprec_linears and moe_grouped_gemm:
        raise UserError(_STOCK_GROUPED_GEMM)
    modules: dict[Any, Any] = {**_OTHERS, DotProductAttention: _ATTENTIONS[attention_backend]}
    if not no_lowprec_linears:
        modules |= _LOWPREC
        if GROUPED_EXPERTS is not None:
            modules[GROUPED_EXPERTS] = LowPrecGroupedMLP
    if moe_grouped_gemm:
        modules[SequentialMLP] = LowPrecGroupedMLP
    return _replaced(spec, modules)


def _replaced(spec: Any, by: Mapping[Any, Any]) -> Any:
    if isinstance(spec, MLASelfAttentionSubmodules):
        spec = _with_known_projections(spec)
    if isinstance(spec, ModuleSpec):
        module, submodules = _replaced(spec.module, by), _replaced(spec.submodules, by)
        return LowPrecMLP.of(submodules) if module is MLP else replace(spec, module=module, submodules=submodules)
    if is_dataclass(spec) and not isinstance(spec, type):
        return replace(spec, **{field.name: _replaced(getattr(spec, field.name), by) for field in fields(spec)})
    if isinstance(spec, partial):
        if getattr(spec.func, "__self__", None) is MLP:  # its builder, from 0.18 on
            return LowPrecMLP.of(_replaced(spec.keywords["submodules"], by))
        options = {name: _replaced(value, by) for name, value in spec.keywords.items()}
        return partial(_replaced(spec.func, by), *(_replaced(value, by) for value in spec.args), **options)
    if isinstance(spec, list | tuple):
        return type(spec)(_replaced(each, by) for each in spec)
    return by.get(spec, spec) if callable(spec) else spec


class _ColumnParallelSpec(ModuleSpec):
    """A spec that equals ``ColumnParallelLinear``: MLASelfAttention takes a projection down only by equality."""

    def __eq__(self, other: object) -> bool:
        return other is ColumnParallelLinear or self is other

    __hash__ = object.__hash__


def _with_known_projections(submodules: MLASelfAttentionSubmodules) -> MLASelfAttentionSubmodules:
    # In 0.16 TELinear is no class without TransformerEngine, which isinstance refuses.
    if multi_latent_attention.HAVE_TE and not isinstance(multi_latent_attention.TELinear, type):
        patches.bind("latent_projection", HAVE_TE=False)
    down = _ColumnParallelSpec(module=DownProjection)
    return replace(submodules, linear_q_down_proj=down, linear_kv_down_proj=down)


def check_supported(config: TransformerConfig) -> None:
    """Check that a config selects only layers that have a low-precision path.

    Raises:
        UserError: it does not; names the field.
    """
    for field, what in _REFUSED.items():
        value = getattr(config, field, None)
        if value:
            raise UserError(
                f"TransformerConfig.{field} is {value!r}, but {what} cannot run under a recipe: leave it at its default"
            )
    if getattr(config, "mlp_chunks_for_training", 1) != 1:
        raise UserError(
            f"TransformerConfig.mlp_chunks_for_training is {config.mlp_chunks_for_training}, but chunks of a "
            "microbatch would repeat random draws under a recipe: leave it at 1"
        )
    if config.multi_latent_attention and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise UserError(
            f"--multi-latent-attention with --tensor-model-parallel-size {config.tensor_model_parallel_size} needs "
            "--sequence-parallel: without it Megatron-core does not sum the gradient of the shared key over heads"
        )


def gpt_block_spec(
    config: TransformerConfig,
    *,
    attention_backend: str = "auto",
    no_lowprec_linears: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Layer specs of a pipeline stage for ``GPTModel``: Megatron-core's local ones after ``low_precision``.

    Args:
        config: the model's.
        attention_backend: as ``low_precision``.
        no_lowprec_linears: as ``low_precision``.
        vp_stage: of an interleaved pipeline, which chunk of the rank.
        pp_rank: None for this process's.

    Raises:
        UserError: as ``low_precision`` and ``check_supported``.
    """
    check_supported(config)
    # Megatron-core's own grouped experts need other packages
    sequential = copy(config)
    sequential.moe_grouped_gemm = False
    block = get_gpt_decoder_block_spec(
        sequential,
        use_transformer_engine=False,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    block = low_precision(
        block,
        attention_backend=attention_backend,
        no_lowprec_linears=no_lowprec_linears,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    return replace(block, layer_norm=Norm)  # apex's norm knows no RMSNorm
