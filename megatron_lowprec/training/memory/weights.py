"""Memory that lasts through a step: weights, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lowprec.optimizer.optimizers import OPTIMIZERS
from megatron_lowprec.recipe.coverage import LinearSite, cached_weights
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import data_parallel_size
from megatron_lowprec.training.memory.layout import Execution, microbatches_of, stage_layers
from megatron_lowprec.training.models.common.rank_sizes import expert_tensor_ranks, stream_bytes, width_of
from megatron_lowprec.training.models.sizes import has_bias, linear_sites, norm_weights, other_weights, sharding

_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "e4m3": 1.0, "e5m2": 1.0}


@dataclass(frozen=True)
class Weights:
    """Weights on one GPU; experts are sharded over other ranks than the rest."""

    dense: int
    expert: int


def stage_weights(config: Config, padded_vocab_size: int, stage: int) -> Weights:
    """Number of weights on one rank of a pipeline stage."""
    hidden, tensor = config.shape.hidden_size, config.tensor_model_parallel_size
    pipeline, layers = config.pipeline_model_parallel_size, stage_layers(config, stage)
    linears = _linears(config, stage, biases=True)
    dense = sum(other_weights(config, layer) for layer in layers) + linears.dense
    embedding = padded_vocab_size // tensor * hidden
    if stage == 0:
        dense += embedding
        if config.position_embedding_type == "learned_absolute":
            dense += config.shape.max_position_embeddings * hidden
    if stage == pipeline - 1:
        dense += norm_weights(config.shape)
        # A tied output layer on another stage than the embedding's has a copy of it.
        dense += embedding if config.untie_embeddings_and_output_weights or pipeline > 1 else 0
    return Weights(dense, linears.expert)


def _linears(config: Config, stage: int, biases: bool) -> Weights:
    """Number of weights of a stage's linear layers on one rank."""
    dense = expert = 0
    for site in linear_sites(config, stage_layers(config, stage)):
        shards = sharding(config, site)
        weights = site.in_features * site.out_features // shards.tensor_ranks
        if biases and has_bias(config, site):
            weights += site.out_features // (shards.tensor_ranks if site.split == "column" else 1)
        dense += shards.copies_on_rank * weights * (not shards.experts)
        expert += shards.copies_on_rank * weights * shards.experts
    return Weights(dense, expert)


def lasting(config: Config, runs: Execution, vocabulary: int, gpus: int, stage: int) -> tuple[dict[str, float], float]:
    """Bytes that last through a step, by part, and the extra bytes of the update."""
    weights = stage_weights(config, vocabulary, stage)
    data = data_parallel_size(config, gpus) * config.context_parallel_size
    copies = gpus // config.pipeline_model_parallel_size  # ranks of a stage, over which its experts are spread
    expert_data = max(1, copies // (config.expert_model_parallel_size * expert_tensor_ranks(config)))
    dense_ranks, expert_ranks = (data, expert_data) if config.use_distributed_optimizer else (1, 1)

    def of_rank(weights: Weights) -> float:
        """Weights whose optimizer state this rank holds."""
        return weights.dense / dense_ranks + weights.expert / expert_ranks

    owned, matrices = of_rank(weights), of_rank(_linears(config, stage, biases=False))
    total = weights.dense + weights.expert
    state = runs.recipe.optimizer
    first, second, main = (_STATE_BYTES[form] for form in state.formats.values())
    row = OPTIMIZERS[config.optimizer]
    moments = len(row.other_state) * owned + (len(row.matrix_state) - len(row.other_state)) * matrices
    half_gradients, stored = config.bf16 and config.grad_reduce_in_bf16, runs.recipe.gradients.stored
    resident = {
        "weights": total * width_of(config) - _saved_by_primary_weights(config, runs, stage),
        "main weights": owned * main if config.bf16 or state.quantized else 0.0,
        "moments": moments * (first + second) / 2,  # all fp32 but AdamW's under a recipe
        "gradients": total * (1.0 if stored else 2.0 if half_gradients else 4.0),
        "kept quantized weights": _kept_weights(config, runs, gpus, stage),
    }
    # Megatron-core converts half gradients to fp32 for its own update, and stored codes are decoded for any update.
    update = owned * 4.0 if stored or (half_gradients and not state.quantized) else 0.0
    # FP8 codes are sent and received at once; stored codes are sent from where they are.
    exchanged = total * (1.0 if stored else 2.0) if runs.recipe.gradients.quantized and data > 1 else 0.0
    whole = _orthogonalized(config, stage) if row.whole_matrices else 0.0
    return resident, max(update, exchanged, whole)


def _orthogonalized(config: Config, stage: int) -> float:
    """Bytes that torch's Muon takes for the largest matrix: update, step and its average in fp32, two iterates and two
    products with themselves in bf16.
    """
    sizes = {(site.in_features, site.out_features) for site in linear_sites(config, stage_layers(config, stage))}
    return max(16.0 * rows * columns + 4.0 * min(rows, columns) ** 2 for rows, columns in sizes)


def fp32_gradients(config: Config, runs: Execution, vocabulary: int, gpus: int, stage: int) -> float:
    """Bytes of fp32 gradients in the backward pass beside stored FP8 codes; 0 where gradients have a buffer.

    All weights until the last microbatch under ``gradients.accumulation`` fp32; else the largest of: both layers of an
    MLP, which one fused function computes, another linear layer, an embedding.
    """
    gradients = runs.recipe.gradients
    if not gradients.stored:
        return 0.0
    if gradients.accumulation == "fp32" and microbatches_of(config, gpus) > 1:
        weights = stage_weights(config, vocabulary, stage)
        return 4.0 * (weights.dense + weights.expert)
    together: dict[str, float] = {}
    for layer in stage_layers(config, stage):
        dense_mlp = 0.0
        for site in linear_sites(config, range(layer, layer + 1)):
            weights_here = site.in_features * site.out_features / sharding(config, site).tensor_ranks
            if site.name.startswith("mlp.linear_fc"):  # of a dense MLP, whose function writes both
                dense_mlp += weights_here
            together[site.name] = max(together.get(site.name, 0.0), weights_here)
        together["mlp"] = max(together.get("mlp", 0.0), dense_mlp)
    if stage in (0, config.pipeline_model_parallel_size - 1):
        together["embedding"] = vocabulary / config.tensor_model_parallel_size * config.shape.hidden_size
    return 4.0 * max(together.values())


def graph_buffers(config: Config, layers: Sequence[int]) -> float:
    """Bytes of what CUDA graphs of a stage's layers hold besides activations: the first layer's input, the last one's
    gradient, and one placeholder as large as the largest weight.
    """
    sizes = [
        site.in_features * site.out_features / sharding(config, site).tensor_ranks
        for site in linear_sites(config, layers)
    ]
    return 2.0 * stream_bytes(config) + max(sizes) * width_of(config)


def _kept_weights(config: Config, runs: Execution, gpus: int, stage: int) -> float:
    """Bytes of quantized weights cached across a step's microbatches: of codes, or of the dtype if emulated."""
    if config.no_cache_weights or microbatches_of(config, gpus) == 1:
        return 0.0
    total = 0.0
    for site, weights in _quantized_layers(config, runs, stage):
        native = runs.native_gemms(config, site)
        linear = runs.linear(config, site.layer_number, site.name)
        kept = [] if config.save_memory else cached_weights(linear)
        if runs.primary_weight(config, site) is not None:  # only a transposed copy, which native GEMMs read
            kept = [name for name in cached_weights(linear) if name == "dgrad" and name in native]
        elif len(kept) > 1 and runs.shares_weight(config, site):
            kept = kept[:1]
        total += weights * sum(runs.cached_weight_bytes(config, site, name) for name in kept)
    return total


def _saved_by_primary_weights(config: Config, runs: Execution, stage: int) -> float:
    """Bytes saved by storing one rank's weights as FP8 codes: the compute dtype's less a code's and its scale's."""
    saved = 0.0
    for site, weights in _quantized_layers(config, runs, stage):
        spec = runs.primary_weight(config, site)
        if spec is not None:
            code = 1.0 + (8.0 / math.prod(spec.block) if spec.block else 0.0)  # a block's decode scale and amax, fp32
            saved += weights * (width_of(config) - code)
    return saved


def _quantized_layers(config: Config, runs: Execution, stage: int) -> Iterator[tuple[LinearSite, float]]:
    """Quantized linear layers of a stage, and the number of weights of each on one rank, without biases."""
    for site in linear_sites(config, stage_layers(config, stage)):
        if not runs.linear(config, site.layer_number, site.name).quantized:
            continue
        shards = sharding(config, site)
        yield site, shards.copies_on_rank * site.in_features * site.out_features / shards.tensor_ranks
