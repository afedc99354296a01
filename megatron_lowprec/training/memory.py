"""Memory of one GPU in training, from sizes alone. No torch, no megatron.

``docs/memory.md`` derives every term. Activations follow arXiv 2205.05198, section 4, adapted to these layers; bytes a
value are written out: 2 for bf16, 4 for fp32, 1 for a dropout mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_lowprec.recipe.native import native_gemms
from megatron_lowprec.recipe.resolve import LinearSite, kept_in_bf16, primary_weight_spec, weight_serves_microbatches
from megatron_lowprec.recipe.schema import Recipe
from megatron_lowprec.training.config import Config
from megatron_lowprec.training.resolve import data_parallel_size, virtual_stages
from megatron_lowprec.training.shapes import linear_sites, sized

GIB = 2.0**30
STATE_BYTES = {"fp32": 4.0, "fp16": 2.0, "e4m3": 1.0, "e5m2": 1.0}


@dataclass(frozen=True)
class Runs:
    """How the layers run: under which recipe, on which architecture ("cpu", "sm90", ...)."""

    recipe: Recipe
    arch: str = "sm90"

    @property
    def fused(self) -> bool:
        """Whether dropout and cross entropy are the fused kernels, which keep no mask and no softmax."""
        return self.arch.startswith("sm")

    def keeps_codes(self, config: Config, name: str) -> bool:
        """Whether a linear layer keeps FP8 codes of its input for wgrad, not the input itself."""
        site = next(site for site in linear_sites(config) if site.name == name)
        if config.sequence_parallel and site.split == "column":  # gathered again for the backward pass
            return False
        native = self.native_gemms(config, site)
        return {"fprop", "wgrad"} <= native and self.recipe.fprop.input == self.recipe.wgrad.input

    def keeps_primary_weights(self, config: Config) -> bool:
        """Whether the weights of quantized layers are FP8 codes alone."""
        asked = config.fp8_param_gather and config.transformer_impl == "local"
        return asked and primary_weight_spec(self.recipe) is not None

    def native_gemms(self, config: Config, site: LinearSite) -> frozenset[str]:
        """The GEMMs of a linear layer that multiply FP8 codes."""
        if not config.bf16 or config.emulate:
            return frozenset()
        ranks = _expert_tensor_size(config) if _is_expert(site) else config.tensor_model_parallel_size
        sizes = site.in_features, site.out_features
        if site.split == "column":
            return native_gemms(self.recipe, self.arch, sizes[0], sizes[1] // ranks)
        return native_gemms(self.recipe, self.arch, sizes[0] // ranks, sizes[1])


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on a GPU of the pipeline stage that needs most.

    ``resident`` lasts through a step, ``kept`` is what forward passes leave for the backward, and of ``transient``
    (what comes and goes at different times on top of both) the largest counts.
    """

    runs: Runs
    stage: int
    stages: int
    gpus: int
    in_flight: float
    resident: Mapping[str, float]
    kept: Mapping[str, float]
    transient: Mapping[str, float]

    @property
    def peak(self) -> float:
        """Most bytes allocated at once; the update of the weights finds no activations left."""
        resident = sum(self.resident.values())
        passes = sum(self.kept.values()) + max(self.transient[name] for name in ("logits", "backward"))
        return resident + max(passes, self.transient["update"])


def plan(config: Config, recipe: Recipe, padded_vocab_size: int, gpus: int, arch: str = "sm90") -> MemoryPlan:
    """The plan of a resolved configuration on ``gpus`` processes, one a GPU of that architecture."""
    stages, runs = range(config.pipeline_model_parallel_size), Runs(recipe, arch)
    plans = [_stage_plan(config, runs, padded_vocab_size, gpus, stage) for stage in stages]
    return max(plans, key=lambda found: found.peak)


def _stage_plan(config: Config, runs: Runs, vocabulary: int, gpus: int, stage: int) -> MemoryPlan:
    first, last = stage == 0, stage == config.pipeline_model_parallel_size - 1
    layers = sized(config.num_layers) // config.pipeline_model_parallel_size
    in_flight = _microbatches_in_flight(config, gpus, stage)
    kept = {
        "layers": in_flight * _kept_of_layers(config, layers, runs),
        "embedding": in_flight * sum(embedding_activations(config).values()) if first else 0.0,
        "head": sum(head_activations(config).values()) if last else 0.0,
    }
    resident, update = _state(config, runs, vocabulary, gpus, stage)
    transient = {
        "logits": logit_bytes(config, vocabulary, runs.fused) if last else 0.0,
        "backward": _recomputed(config, layers, runs) + _backward_of_a_layer(config, runs),
        "update": update,
    }
    return MemoryPlan(runs, stage, config.pipeline_model_parallel_size, gpus, in_flight, resident, kept, transient)


# ---- weights, gradients, optimizer


@dataclass(frozen=True)
class Weights:
    """Numbers of weights on one GPU: those of experts are shared by other ranks than the rest."""

    dense: int
    expert: int


def stage_weights(config: Config, padded_vocab_size: int, stage: int) -> Weights:
    """Weights that one rank of a pipeline stage holds."""
    hidden, tensor, pipeline = (
        sized(config.hidden_size),
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
    )
    layers = sized(config.num_layers) // pipeline
    norm = hidden * (2 if config.normalization == "LayerNorm" else 1)
    dense, expert = layers * 2 * norm, 0
    for site in linear_sites(config)[: 4 * layers]:  # all layers are alike
        if _is_expert(site):
            expert += sized(config.num_experts) // config.expert_model_parallel_size * _linear_weights(config, site)
        else:
            dense += _linear_weights(config, site)
    if config.num_experts:
        dense += layers * config.num_experts * hidden  # router
    embedding = padded_vocab_size // tensor * hidden
    if stage == 0:
        dense += embedding
        if config.position_embedding_type == "learned_absolute":
            dense += sized(config.max_position_embeddings) * hidden
    if stage == pipeline - 1:
        dense += norm
        # A tied output layer of another stage than the embedding's has a copy of it.
        dense += embedding if config.untie_embeddings_and_output_weights or pipeline > 1 else 0
    return Weights(dense, expert)


def _linear_weights(config: Config, site: LinearSite) -> int:
    """Weights of one rank's shard of a linear layer (of one expert's), its bias included."""
    ranks = _expert_tensor_size(config) if _is_expert(site) else config.tensor_model_parallel_size
    bias = not config.disable_bias_linear or (config.add_qkv_bias and site.name.endswith("qkv"))
    biases = site.out_features // (ranks if site.split == "column" else 1)
    return site.in_features * site.out_features // ranks + bias * biases


def _state(config: Config, runs: Runs, vocabulary: int, gpus: int, stage: int) -> tuple[dict[str, float], float]:
    """What lasts through a step, and the bytes that the update needs beyond it."""
    weights = stage_weights(config, vocabulary, stage)
    data = data_parallel_size(config, gpus) * config.context_parallel_size
    copies = gpus // config.pipeline_model_parallel_size  # ranks of a stage, which share its experts
    expert_data = max(1, copies // (config.expert_model_parallel_size * _expert_tensor_size(config)))
    distributed = config.use_distributed_optimizer
    # Weights whose optimizer state this rank holds.
    owned = weights.dense / (data if distributed else 1) + weights.expert / (expert_data if distributed else 1)
    total = weights.dense + weights.expert
    state = runs.recipe.optimizer
    first, second, main = (STATE_BYTES[form] for form in state.formats.values())
    half_gradients = config.bf16 and config.grad_reduce_in_bf16
    resident = {
        "weights": total * _width(config) - _primary_weights(config, runs, stage) * (_width(config) - 1.0),
        "main weights": owned * main if config.bf16 or state.quantized else 0.0,
        "moments": owned * (first + second),
        "gradients": total * (2.0 if half_gradients else 4.0),
        "kept quantized weights": _kept_weights(config, runs, gpus, stage),
    }
    # Megatron-core makes fp32 gradients of half ones for its own update; FP8 codes are sent and received at once.
    update = owned * 4.0 if half_gradients and not state.quantized else 0.0
    exchanged = total * 2.0 if runs.recipe.gradients.quantized and data > 1 else 0.0
    return resident, max(update, exchanged)


def _kept_weights(config: Config, runs: Runs, gpus: int, stage: int) -> float:
    """Quantized weights that are kept between the microbatches of a step: a byte a value, or emulated the dtype's."""
    if _microbatches(config, gpus) == 1:
        return 0.0
    total = 0.0
    for site, weights in _quantized_layers(config, runs, stage):
        native = runs.native_gemms(config, site)
        kept = [name for name, gemm in runs.recipe.gemms.items() if weight_serves_microbatches(gemm)]
        if runs.keeps_primary_weights(config):  # a transposed copy alone, which native products read
            kept = ["dgrad"] if "dgrad" in native else []
        total += weights * sum(1 if name in native else _width(config) for name in kept)
    return total


def _primary_weights(config: Config, runs: Runs, stage: int) -> float:
    """Weights of one rank that are FP8 codes without a copy in the compute dtype."""
    if not runs.keeps_primary_weights(config):
        return 0.0
    return sum(weights for _, weights in _quantized_layers(config, runs, stage))


def _quantized_layers(config: Config, runs: Runs, stage: int) -> Iterator[tuple[LinearSite, float]]:
    """Linear layers of a stage that are under the recipe, and the weights of each on one rank, without biases."""
    layers = sized(config.num_layers)
    here = layers // config.pipeline_model_parallel_size
    for site in linear_sites(config):
        # Interleaved stages hold other layers in the same number; which ones are left in bf16 then differs a little.
        if (site.layer_number - 1) // here != stage or kept_in_bf16(runs.recipe, site.layer_number, site.name, layers):
            continue
        ranks = _expert_tensor_size(config) if _is_expert(site) else config.tensor_model_parallel_size
        experts = sized(config.num_experts) // config.expert_model_parallel_size if _is_expert(site) else 1
        yield site, experts * site.in_features * site.out_features / ranks


# ---- activations of one microbatch


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
    tokens, hidden, width = _tokens(config), sized(config.hidden_size), _width(config)
    tensor = config.tensor_model_parallel_size
    cut = tensor if config.sequence_parallel else 1
    heads, channels = sized(config.num_attention_heads), sized(config.kv_channels)
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
        kept["cosines and sines"] = 4 * sized(config.seq_length) * int(channels * config.rotary_percent) * width
    kept |= _attention_core(config, heads * tokens / tensor)
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


def _attention_core(config: Config, rows: float) -> dict[str, float]:
    """What the attention product keeps besides q, k, v and its output; ``rows`` of scores on this rank."""
    if config.recompute_granularity == "selective":
        return {}
    if config.attention_backend != "local":
        return {"log-sum-exp of attention": 4 * rows}
    scores = rows * sized(config.seq_length)
    # Probabilities in fp32 and in the compute dtype, and the mask of their dropout.
    return {"scores of attention": scores * (4 + _width(config) + (1 if config.attention_dropout else 0))}


def _mlp_activations(config: Config) -> dict[str, float]:
    wide = _tokens(config) * sized(config.ffn_hidden_size) * _width(config) / config.tensor_model_parallel_size
    return {"output of linear_fc1": wide * (2 if config.swiglu else 1), "input of linear_fc2": wide}


def _expert_activations(config: Config) -> dict[str, float]:
    """As a dense MLP's, for --moe-router-topk experts a token, when the load is balanced."""
    tensor = _expert_tensor_size(config)
    # Ranks that share each expert's weights see the same tokens; else each rank sees its part of the sequence.
    tokens = _tokens(config) * config.moe_router_topk / (config.tensor_model_parallel_size // tensor)
    width, ffn = _width(config), sized(config.moe_ffn_hidden_size) / tensor
    kept = {
        "inputs of the experts": tokens * sized(config.hidden_size) * width,
        "output of linear_fc1": tokens * ffn * width * (2 if config.swiglu else 1),
        "input of linear_fc2": tokens * ffn * width,
        # Softmax and choice of the router, and where each token went: int64 indices and fp32 probabilities.
        "routing": tokens * (3 * 8 + 4) + _tokens(config) * sized(config.num_experts) * (4 + width + 1),
    }
    if not config.swiglu:  # the product with the router's probability is not fused
        kept["activation before the router's probability"] = tokens * ffn * width
    return kept


def embedding_activations(config: Config) -> dict[str, float]:
    """Bytes that the embedding keeps for one microbatch."""
    tokens, hidden = _tokens(config), sized(config.hidden_size)
    cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
    kept = {"token ids and positions": 2 * 8.0 * tokens}
    if config.hidden_dropout:
        kept["mask of the embedding's dropout"] = tokens * hidden / cut
    return kept


def head_activations(config: Config) -> dict[str, float]:
    """Bytes that the final norm and the output layer keep, without the logits."""
    cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
    stream = _tokens(config) * sized(config.hidden_size) * _width(config) / cut
    return {
        "input of the final norm": stream,
        "input of the output layer": stream,
        "statistics of the norm": _norm_statistics(config, 1),
    }


def logit_bytes(config: Config, padded_vocab_size: int, fused: bool = False) -> float:
    """Logits; the fused cross entropy writes their gradient over them. Megatron-core's makes two copies in fp32."""
    copies = 0 if fused else 4 + 4
    return _tokens(config) * padded_vocab_size / config.tensor_model_parallel_size * (_width(config) + copies)


def _kept_of_layers(config: Config, layers: int, runs: Runs) -> float:
    """What a stage's layers keep of one microbatch; recomputed ones only the input of each chunk."""
    whole = sum(layer_activations(config, runs).values())
    if config.recompute_granularity != "full":
        return layers * whole
    chunk = sized(config.recompute_num_layers)
    stream = layer_activations(config)["input of the first norm"]
    if config.recompute_method == "uniform":
        return -(-layers // chunk) * stream
    recomputed = min(chunk, layers)
    return recomputed * stream + (layers - recomputed) * whole


def _recomputed(config: Config, layers: int, runs: Runs) -> float:
    """Activations that are made again at once in the backward pass."""
    activations = layer_activations(config, runs)
    if config.recompute_granularity == "full":
        chunk = min(sized(config.recompute_num_layers), layers) if config.recompute_method == "uniform" else 1
        return chunk * sum(activations.values())
    if config.recompute_granularity == "selective" and config.attention_backend == "local":
        rows = _tokens(config) * sized(config.num_attention_heads) / config.tensor_model_parallel_size
        return rows * sized(config.seq_length) * (4 + _width(config) + (1 if config.attention_dropout else 0))
    return 0.0


def _backward_of_a_layer(config: Config, runs: Runs) -> float:
    """Gradients that live at once around the widest linear layer, and its operands where they are quantized."""
    tokens, width = float(_tokens(config)), _width(config)
    stream = tokens * sized(config.hidden_size) * width
    gates = 2 if config.swiglu else 1
    ffn, ranks = sized(config.ffn_hidden_size), config.tensor_model_parallel_size
    if config.num_experts:
        # One expert after the other; a balanced one sees its share of the tokens.
        tokens *= config.moe_router_topk / config.num_experts * config.expert_model_parallel_size
        ffn, ranks = sized(config.moe_ffn_hidden_size), _expert_tensor_size(config)
    wide = tokens * ffn * width / ranks
    operands = 0.0
    if runs.recipe.wgrad.quantized or runs.recipe.dgrad.quantized:
        operands = 2 * gates * wide + stream  # dy along its rows and along its columns; x
    again = wide if recomputes_gelu(config, runs) else 0.0
    return stream + (1 + gates) * wide + operands + again


# ---- the layout


def _microbatches(config: Config, gpus: int) -> int:
    return sized(config.global_batch_size) // (sized(config.micro_batch_size) * data_parallel_size(config, gpus))


def _microbatches_in_flight(config: Config, gpus: int, stage: int) -> float:
    """Microbatches whose activations a stage holds at once, in units of all of its layers.

    One forward, one backward: as many as stages follow, itself included. Interleaved, Megatron-core warms up
    ``2 (stages - stage - 1) + (chunks - 1) stages`` chunks first.
    """
    stages, microbatches = config.pipeline_model_parallel_size, _microbatches(config, gpus)
    chunks = virtual_stages(config)
    if chunks is None:
        return min(stages - stage, microbatches)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(warm_up + 1, chunks * microbatches) / chunks


def _is_expert(site: LinearSite) -> bool:
    return "experts" in site.name


def _expert_tensor_size(config: Config) -> int:
    """Ranks that cut each expert: the tensor-parallel ones, unless experts are spread over ranks themselves."""
    return 1 if config.expert_model_parallel_size > 1 else config.tensor_model_parallel_size


def _tokens(config: Config) -> int:
    """Tokens of a microbatch on one rank, before sequence parallelism cuts them."""
    return sized(config.micro_batch_size) * sized(config.seq_length) // config.context_parallel_size


def _width(config: Config) -> int:
    return 2 if config.bf16 else 4


def _norm_statistics(config: Config, norms: int) -> float:
    """Mean and reciprocal deviation of each token in fp32, a root mean square alone with RMSNorm."""
    cut = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return norms * _tokens(config) * 4.0 * (2 if config.normalization == "LayerNorm" else 1) / cut
