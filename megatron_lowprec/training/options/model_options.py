"""Options of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.training.options.declaration import Group, Part, arg


@dataclass(frozen=True)
class ModelOptions(Group):
    """model"""

    PART = Part.SHAPE

    num_layers: int | None = arg(None, "transformer layers", least=1, most=10_000, required=True)
    hidden_size: int | None = arg(None, "width of the residual stream", least=1, required=True)
    ffn_hidden_size: int | None = arg(
        None, "width of the MLP; default 4 x hidden, with --swiglu 2/3 of it in multiples of 64", least=1
    )
    num_attention_heads: int | None = arg(None, "attention heads", least=1, required=True)
    kv_channels: int | None = arg(None, "channels of a head; default hidden / heads", least=1)
    group_query_attention: bool = arg(False, "let groups of heads share keys and values", Part.UPDATE)
    num_query_groups: int = arg(1, "groups of --group-query-attention", least=1)
    seq_length: int | None = arg(None, "tokens of a sample", Part.DATA, least=1, required=True)
    max_position_embeddings: int | None = arg(
        None,
        "length of the learned position table; default --seq-length",
        least=1,
        read_with="position_embedding_type=learned_absolute",
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = arg("learned_absolute", "kind of position embedding")
    normalization: Literal["LayerNorm", "RMSNorm"] = arg("LayerNorm", "kind of norm")
    norm_epsilon: float = arg(1e-5, "epsilon of the norms", Part.FUNCTION, least=0)
    swiglu: bool = arg(False, "gated SiLU in the MLP instead of GELU")
    squared_relu: bool = arg(False, "squared ReLU in the MLP instead of GELU", Part.FUNCTION)
    disable_bias_linear: bool = arg(False, "no bias in the linear layers")
    add_qkv_bias: bool = arg(False, "a bias in the QKV projection even with --disable-bias-linear")
    qk_layernorm: bool = arg(
        False, "a norm of each head's queries and keys; with --multi-latent-attention of their latents"
    )
    untie_embeddings_and_output_weights: bool = arg(
        False, "an output layer of its own instead of the embedding's weight"
    )
    hidden_dropout: float = arg(0.1, "dropout of the residual branches", Part.UPDATE, least=0, below=1)
    attention_dropout: float = arg(0.1, "dropout of the attention weights", Part.UPDATE, least=0, below=1)
    init_method_std: float = arg(
        0.02, "standard deviation of the initial weights (output projections: / sqrt(2 layers))", Part.START, least=0
    )
    position_embedding_init_std: float | None = arg(
        None,
        "standard deviation of the initial learned positions; default --init-method-std, as in Megatron (ours)",
        Part.START,
        least=0,
    )


@dataclass(frozen=True)
class RopeOptions(Group):
    """rope"""

    PART = Part.FUNCTION
    READ_WITH = "position_embedding_type=rope"

    rotary_base: int = arg(10000, "base period of rope", above=1)
    rotary_percent: float = arg(1.0, "share of a head's channels that rope turns", above=0, most=1)
    use_rope_scaling: bool = arg(
        False,
        "Llama 3's scaling of rope's low frequencies, from 8192 tokens",
        needs="position_embedding_type=rope rope_type=rope",
    )
    rope_scaling_factor: float = arg(8.0, "factor of --use-rope-scaling: 8 in Llama 3.1, 32 in 3.2", least=1)
    rope_type: Literal["rope", "yarn"] = arg(
        "rope",
        "yarn: rope with YaRN's scaling (arXiv 2309.00071)",
        needs="position_embedding_type=rope rotary_percent=1.0 yarn_original_max_position_embeddings",
    )
    rotary_scaling_factor: float = arg(1.0, "YaRN's factor of the context's length", least=1)
    yarn_original_max_position_embeddings: int | None = arg(None, "YaRN's length before the extension", least=1)
    yarn_beta_fast: float = arg(32.0, "YaRN's turns in that length from which a frequency is kept", above=0)
    yarn_beta_slow: float = arg(1.0, "YaRN's turns in that length up to which it is divided by the factor", above=0)
