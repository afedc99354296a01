"""GPT-2: LayerNorm, learned positions, the tanh approximation of GELU (``gelu_new``), biases, transposed weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.hugging_face import HuggingFace, TensorMap
from megatron_lowprec.training.models.common.tensor_layout import concatenate, join_qkv, split_qkv, transpose

_LINEARS = (
    ("self_attention.linear_proj", "attn.c_proj"),
    ("mlp.linear_fc1", "mlp.c_fc"),
    ("mlp.linear_fc2", "mlp.c_proj"),
)


def _unsupported(config: Config) -> list[str]:
    """Heads of another width: GPT-2's split the hidden size."""
    same = config.kv_channels == config.shape.hidden_size // config.shape.num_attention_heads
    return [] if same else [f"--kv-channels {config.kv_channels}"]


def _from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The MLP's width; UserError for another dropout behind the embedding than in the residual branches."""
    if hf["embd_pdrop"] != hf["resid_pdrop"]:
        raise UserError(
            f"config.json has embd_pdrop {hf['embd_pdrop']} and resid_pdrop {hf['resid_pdrop']}, and --hidden-dropout "
            "is both: give them one value there; they have no effect outside of training"
        )
    return {"ffn_hidden_size": hf["n_inner"] or 4 * hf["n_embd"]}


def _known_name(name: str) -> str | None:
    """Name with the prefix that OpenAI's own files lack; None for the causal mask in these files."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def _tensor_maps(config: Config) -> Iterator[TensorMap]:
    """Transposed linear weights; queries, keys and values concatenated."""
    yield TensorMap("embedding.word_embeddings.weight", ("transformer.wte.weight",))
    yield TensorMap("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for part in ("weight", "bias"):
        for layer in range(config.shape.num_layers):
            theirs, ours = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            yield TensorMap(f"{ours}.input_layernorm.{part}", (f"{theirs}.ln_1.{part}",))
            yield TensorMap(f"{ours}.pre_mlp_layernorm.{part}", (f"{theirs}.ln_2.{part}",))
            yield TensorMap(
                f"{ours}.self_attention.linear_qkv.{part}",
                (f"{theirs}.attn.c_attn.{part}",),
                to_hf=lambda tensor: [transpose(concatenate(split_qkv(config.shape, tensor)))],
                from_hf=lambda tensors: join_qkv(config.shape, *transpose(tensors[0]).chunk(3)),
            )
            for linear, name in _LINEARS:
                yield TensorMap(
                    f"{ours}.{linear}.{part}",
                    (f"{theirs}.{name}.{part}",),
                    to_hf=lambda tensor: [transpose(tensor)],
                    from_hf=lambda tensors: transpose(tensors[0]),
                )
        yield TensorMap(f"decoder.final_layernorm.{part}", (f"transformer.ln_f.{part}",))


GPT2 = HuggingFace(
    model_type="gpt2",
    title="GPT-2",
    class_name="GPT2LMHeadModel",
    options={
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "swiglu": False,
        "squared_relu": False,
        "disable_bias_linear": False,
        "group_query_attention": False,
        "qk_layernorm": False,
        "multi_latent_attention": False,
        "num_experts": None,
    },
    keys={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "hidden_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
    },
    variants={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    tensor_maps=_tensor_maps,
    known_name=_known_name,
    unsupported=_unsupported,
    to_config=lambda config: {"embd_pdrop": config.hidden_dropout},
    from_config=_from_config,
)
