"""Activations of a microbatch, saved and transient: arXiv 2205.05198, section 4, adapted to these layers.

``training/models/`` has the tensors of attention and MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lowprec.recipe.quant_spec import QuantSpec
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import virtual_stages
from megatron_lowprec.training.memory.layout import Execution
from megatron_lowprec.training.memory.saved_tensors import saved_bytes
from megatron_lowprec.training.models.architectures import architecture_of
from megatron_lowprec.training.models.common.rank_sizes import (
    sequence_ranks,
    stream_bytes,
    stream_entries,
    tokens_of,
    width_of,
)
from megatron_lowprec.training.models.common.saved_tensor import SavedTensor
from megatron_lowprec.training.models.sizes import linear_sites, sharding


def layer_activations(config: Config, runs: Execution, layer: int | None = None) -> dict[str, float]:
    """Bytes that one transformer layer saves for backward, by tensor, for one microbatch; the last one by default.

    A linear layer saves its input in the compute dtype, or one byte per value if its FP8 GEMMs are native.
    """
    layer = layer or config.shape.num_layers
    architecture, stream = architecture_of(config), stream_entries(config)
    saved = [
        SavedTensor("input of the first norm", stream),
        *architecture.attention.activations(config, layer),
        SavedTensor("input of the second norm", stream),
        SavedTensor("statistics of the norms", 2 * _norm_statistics(config), width=4),
        *architecture.mlp.activations(config, layer),
    ]
    if config.hidden_dropout:
        saved.append(SavedTensor("masks of the two residual dropouts", 2 * stream, width=1, unfused=True))
    return saved_bytes(saved, config, runs, layer)


def embedding_activations(config: Config) -> dict[str, float]:
    """Bytes that the embedding saves for one microbatch."""
    tokens, hidden = tokens_of(config), config.shape.hidden_size
    saved = {"token ids and positions": 2 * 8.0 * tokens}
    if config.hidden_dropout:
        saved["mask of the embedding's dropout"] = tokens * hidden / sequence_ranks(config)
    return saved


def head_activations(config: Config) -> dict[str, float]:
    """Bytes that the final norm and the output layer save, without the logits."""
    return {
        "input of the final norm": stream_bytes(config),
        "input of the output layer": stream_bytes(config),
        "statistics of the norm": 4 * _norm_statistics(config),
    }


def logit_bytes(config: Config, padded_vocab_size: int, fused: bool = False) -> float:
    """Bytes of logits of one chunk of tokens, by default of all.

    The fused cross entropy overwrites them with gradients, Megatron-core's adds two fp32 copies.
    """
    copies = 0 if fused else 4 + 4
    tokens = config.output_layer_chunk_size or tokens_of(config)
    return tokens * padded_vocab_size / config.tensor_model_parallel_size * (width_of(config) + copies)


def kept_of_layers(config: Config, layers: Sequence[int], runs: Execution) -> float:
    """Bytes that a stage's layers save for one microbatch; layers recomputed together save only the first's input."""
    if config.recompute_granularity != "full":
        return sum(_whole(config, runs, layers))
    together, parts = config.recompute_num_layers, _chunks(config, layers)
    assert together is not None, "resolve_run() has not run"
    if config.recompute_method == "uniform":
        return sum(-(-len(part) // together) for part in parts) * stream_bytes(config)
    recomputed = sum(len(part[:together]) for part in parts)
    return recomputed * stream_bytes(config) + sum(sum(_whole(config, runs, part[together:])) for part in parts)


def recomputed_at_once(config: Config, layers: Sequence[int], runs: Execution) -> float:
    """Bytes of activations that are recomputed at once in the backward pass."""
    if config.recompute_granularity == "full":
        together = (config.recompute_num_layers or 1) if config.recompute_method == "uniform" else 1
        return max(
            sum(_whole(config, runs, part[first : first + together]))
            for part in _chunks(config, layers)
            for first in range(0, len(part), together)
        )
    if config.recompute_granularity == "selective":
        return architecture_of(config).attention.recomputed_bytes(config)
    return 0.0


def backward_of_a_layer(config: Config, runs: Execution) -> float:
    """Bytes of gradients live at once around the widest linear layer, with its operands if quantized.

    An input of linear_fc2 that --recompute-gelu recomputes adds nothing: it is freed before the gradient of
    linear_fc1's output, which is as large, is computed.
    """
    stream = float(tokens_of(config)) * config.shape.hidden_size * width_of(config)
    mlp = architecture_of(config).mlp
    wide = mlp.backward_bytes(config)
    gates = 2 if any(site.gated for site in mlp.linear_sites(config, config.shape.num_layers)) else 1
    gradients, operands = (1 + gates) * wide, 0.0
    if any(linear.wgrad.quantized or linear.dgrad.quantized for linear in runs.recipe.linear_recipes):
        of_dy = 2 * gates * wide * runs.grad_output_width(config) / width_of(config)  # rowwise and columnwise
        # the gradient that dy is computed from is freed by then; measured plans of small models count it nevertheless
        gradients = max(gradients, gates * wide + of_dy) if config.save_memory else (1 + 3 * gates) * wide
        operands = _other_operand(config, runs, stream)  # x or w
    decoded = 0.0
    if runs.recipe.activations.swiglu_input != "none":
        decoded = (1 + gates) * wide  # SwiGLU's output, and its decoded input
    return stream + gradients + operands + decoded


def _other_operand(config: Config, runs: Execution, stream: float) -> float:
    """Bytes of x in wgrad, or of fprop's fp32 values of w in dgrad if they are more; x without codes has them too."""
    x, w = stream, 0.0
    sites = linear_sites(config, range(1, config.shape.num_layers + 1))
    linears = {site: runs.linear(config, site.layer_number, site.name) for site in sites}
    again = [site for site, linear in linears.items() if _of_fprop(linear.wgrad.input)]
    if not all(runs.saved_codes(config, site.layer_number, site.name) for site in again):
        x += stream / width_of(config) * 4.0
    if any(_of_fprop(linear.dgrad.weight) for linear in linears.values()):
        w = 4.0 * max(site.in_features * site.out_features / sharding(config, site).tensor_ranks for site in sites)
    return max(x, w)


def _of_fprop(operand: QuantSpec | None) -> bool:
    return operand is not None and operand.source == "fprop"


def _chunks(config: Config, layers: Sequence[int]) -> list[Sequence[int]]:
    """A stage's layers by chunks of an interleaved pipeline, each of which recomputes by itself."""
    size = len(layers) // (virtual_stages(config) or 1)
    return [layers[first : first + size] for first in range(0, len(layers), size)]


def _whole(config: Config, runs: Execution, layers: Sequence[int]) -> list[float]:
    """Bytes that each of the layers saves without recomputation."""
    return [sum(layer_activations(config, runs, layer).values()) for layer in layers]


def _norm_statistics(config: Config) -> float:
    """Each token's mean and reciprocal deviation in fp32; RMSNorm has only a reciprocal root mean square."""
    return tokens_of(config) * (2 if config.normalization == "LayerNorm" else 1) / sequence_ranks(config)
