"""What a microbatch keeps for its backward pass, and what comes and goes: arXiv 2205.05198, section 4, adapted to these
layers.
"""

from __future__ import annotations

from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.memory.layout import Runs, expert_tensor_size, tokens_of, width_of
from megatron_lowprec.training.models.sizes import require

_INPUTS = {
    "input of linear_qkv": "self_attention.linear_qkv",
    "input of the MLP": "mlp.linear_fc1",
    "input of linear_fc2": "mlp.linear_fc2",
}


def layer_activations(config: Config, runs: Runs | None = None) -> dict[str, float]:
    """Bytes that one transformer layer keeps for its backward pass, by tensor, for one microbatch.

    A linear layer keeps its input in the compute dtype, or one byte a value of it where FP8 products are native.
    scaled_dot_product_attention keeps queries, keys, values, output and the log-sum-exp of each row, no scores; its
    output stays beside the FP8 codes that linear_proj keeps of it. Without ``runs``: a bf16 recipe on a CPU.
    """
    tokens, hidden, width = tokens_of(config), require(config.hidden_size), width_of(config)
    tensor = config.tensor_model_parallel_size
    cut = tensor if config.sequence_parallel else 1
    heads, channels = require(config.num_attention_heads), require(config.kv_channels)
    stream = tokens * hidden * width / cut
    query = tokens * heads * channels * width / tensor
    key_value = tokens * config.num_query_groups * channels * width / tensor
    rope, grouped = config.position_embedding_type == "rope", config.num_query_groups < heads
    kept = {
        "input of the first norm": stream,
        "input of linear_qkv": stream,
        "output of linear_qkv": query + 2 * key_value,
        "input of linear_proj (output of attention)": query,
        "input of the second norm": stream,
        "input of the MLP": stream,
        "statistics of the norms": _norm_statistics(config, 2),
    }
    if rope or grouped:
        kept["queries and keys on their own"] = query + (key_value if rope else 0.0)
    if rope:  # cosine and sine, for queries and for keys
        kept["cosines and sines"] = 4 * require(config.seq_length) * int(channels * config.rotary_percent) * width
    kept |= _attention_core(config)
    kept |= _expert_activations(config) if config.num_experts else _mlp_activations(config)
    if config.hidden_dropout and not (runs is not None and runs.fused):
        kept["masks of the two residual dropouts"] = 2 * tokens * hidden / cut
    if runs is not None and not config.num_experts:
        for tensor_name, linear in _INPUTS.items():
            if runs.keeps_codes(config, linear):
                kept[tensor_name] /= width
        if recomputes_gelu(config, runs):
            del kept["input of linear_fc2"]
        if runs.keeps_codes(config, "self_attention.linear_proj"):
            kept["FP8 codes of linear_proj's input"] = query / width
    return kept


def recomputes_gelu(config: Config, runs: Runs) -> bool:
    """Whether --recompute-gelu leaves the input of linear_fc2 to the backward pass."""
    others = config.swiglu or config.squared_relu or config.disable_bias_linear or config.num_experts
    return config.recompute_gelu and runs.fused and not others


def _attention_core(config: Config) -> dict[str, float]:
    """What the attention product keeps besides q, k, v and its output."""
    if config.recompute_granularity == "selective":
        return {}
    if config.attention_backend != "local":
        return {"log-sum-exp of attention": 4 * _score_rows(config)}
    return {"scores of attention": _scores(config)}


def _scores(config: Config) -> float:
    """Probabilities of attention in fp32 and in the compute dtype, and the mask of their dropout."""
    mask = 1 if config.attention_dropout else 0
    return _score_rows(config) * require(config.seq_length) * (4 + width_of(config) + mask)


def _score_rows(config: Config) -> float:
    return tokens_of(config) * require(config.num_attention_heads) / config.tensor_model_parallel_size


def _mlp_activations(config: Config) -> dict[str, float]:
    wide = tokens_of(config) * require(config.ffn_hidden_size) * width_of(config) / config.tensor_model_parallel_size
    return {"output of linear_fc1": wide * (2 if config.swiglu else 1), "input of linear_fc2": wide}


def _expert_activations(config: Config) -> dict[str, float]:
    """As a dense MLP's, for --moe-router-topk experts a token, when the load is balanced."""
    tensor = expert_tensor_size(config)
    # Ranks that share each expert's weights see the same tokens; else each rank sees its part of the sequence.
    tokens = tokens_of(config) * config.moe_router_topk / (config.tensor_model_parallel_size // tensor)
    width, ffn = width_of(config), require(config.moe_ffn_hidden_size) / tensor
    kept = {
        "inputs of the experts": tokens * require(config.hidden_size) * width,
        "output of linear_fc1": tokens * ffn * width * (2 if config.swiglu else 1),
        "input of linear_fc2": tokens * ffn * width,
        # Softmax and choice of the router, and where each token went: int64 indices and fp32 probabilities.
        "routing": tokens * (3 * 8 + 4) + tokens_of(config) * require(config.num_experts) * (4 + width + 1),
    }
    if not config.swiglu:  # the product with the router's probability is not fused
        kept["activation before the router's probability"] = tokens * ffn * width
    return kept


def embedding_activations(config: Config) -> dict[str, float]:
    """Bytes that the embedding keeps for one microbatch."""
    tokens, hidden = tokens_of(config), require(config.hidden_size)
    cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
    kept = {"token ids and positions": 2 * 8.0 * tokens}
    if config.hidden_dropout:
        kept["mask of the embedding's dropout"] = tokens * hidden / cut
    return kept


def head_activations(config: Config) -> dict[str, float]:
    """Bytes that the final norm and the output layer keep, without the logits."""
    cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
    stream = tokens_of(config) * require(config.hidden_size) * width_of(config) / cut
    return {
        "input of the final norm": stream,
        "input of the output layer": stream,
        "statistics of the norm": _norm_statistics(config, 1),
    }


def logit_bytes(config: Config, padded_vocab_size: int, fused: bool = False) -> float:
    """Logits; the fused cross entropy writes their gradient over them. Megatron-core's makes two copies in fp32."""
    copies = 0 if fused else 4 + 4
    return tokens_of(config) * padded_vocab_size / config.tensor_model_parallel_size * (width_of(config) + copies)


def kept_of_layers(config: Config, layers: int, runs: Runs) -> float:
    """What a stage's layers keep of one microbatch; recomputed ones only the input of each chunk."""
    whole = sum(layer_activations(config, runs).values())
    if config.recompute_granularity != "full":
        return layers * whole
    chunk = require(config.recompute_num_layers)
    stream = layer_activations(config)["input of the first norm"]
    if config.recompute_method == "uniform":
        return -(-layers // chunk) * stream
    recomputed = min(chunk, layers)
    return recomputed * stream + (layers - recomputed) * whole


def recomputed_at_once(config: Config, layers: int, runs: Runs) -> float:
    """Activations that are made again at once in the backward pass."""
    activations = layer_activations(config, runs)
    if config.recompute_granularity == "full":
        chunk = min(require(config.recompute_num_layers), layers) if config.recompute_method == "uniform" else 1
        return chunk * sum(activations.values())
    if config.recompute_granularity == "selective" and config.attention_backend == "local":
        return _scores(config)
    return 0.0


def backward_of_a_layer(config: Config, runs: Runs) -> float:
    """Gradients that live at once around the widest linear layer, and its operands where they are quantized."""
    tokens, width = float(tokens_of(config)), width_of(config)
    stream = tokens * require(config.hidden_size) * width
    gates = 2 if config.swiglu else 1
    ffn, ranks = require(config.ffn_hidden_size), config.tensor_model_parallel_size
    if config.num_experts:
        # One expert after the other; a balanced one sees its share of the tokens.
        tokens *= config.moe_router_topk / config.num_experts * config.expert_model_parallel_size
        ffn, ranks = require(config.moe_ffn_hidden_size), expert_tensor_size(config)
    wide = tokens * ffn * width / ranks
    operands = 0.0
    if runs.recipe.wgrad.quantized or runs.recipe.dgrad.quantized:
        operands = 2 * gates * wide + stream  # dy along its rows and along its columns; x
    again = wide if recomputes_gelu(config, runs) else 0.0
    return stream + (1 + gates) * wide + operands + again


def _norm_statistics(config: Config, norms: int) -> float:
    """Mean and reciprocal deviation of each token in fp32, a root mean square alone with RMSNorm."""
    cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return norms * tokens_of(config) * 4.0 * (2 if config.normalization == "LayerNorm" else 1) / cut
