"""The mixture of experts: a router, and dense MLPs, of which each token passes through a few."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.fields import check_divisible, require
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common import mlp
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.models.common.rank_sizes import stream_bytes, tokens_of, width_of

if TYPE_CHECKING:
    from megatron_lowprec.training.memory.layout import Runs


def resolve(config: Config) -> Config:
    """The options with --ffn-hidden-size filled, and --moe-ffn-hidden-size, which defaults to it."""
    if config.moe_router_topk > require(config.num_experts):
        raise UserError(
            f"--moe-router-topk {config.moe_router_topk} is more than --num-experts {config.num_experts}; lower it"
        )
    config = mlp.resolve(config)
    return replace(config, moe_ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size)


def check_parallelism(config: Config, data_parallel_size: int) -> None:
    """Reject an expert-parallel size that does not divide experts and ranks, and layouts that Megatron-core lacks."""
    tensor, expert = config.tensor_model_parallel_size, config.expert_model_parallel_size
    check_divisible("--num-experts", require(config.num_experts), "--expert-model-parallel-size", expert)
    check_divisible("the data-parallel size", data_parallel_size, "--expert-model-parallel-size", expert)
    if tensor > 1 and not config.sequence_parallel:
        raise UserError("experts with --tensor-model-parallel-size above 1 need --sequence-parallel")
    if tensor > 1 and not config.disable_bias_linear:
        raise UserError("experts with --tensor-model-parallel-size above 1 have no biases; add --disable-bias-linear")
    if expert > 1 and config.use_cpu_initialization:
        raise UserError("--use-cpu-initialization would give every expert-parallel rank the same experts; leave it out")


def check_cuda_graphs(config: Config) -> None:
    """Reject CUDA graphs: the router determines an expert's number of tokens."""
    raise UserError(
        f"--cuda-graph-impl {config.cuda_graph_impl} captures layers whose sizes never change, and those of "
        f"--num-experts {config.num_experts} follow the router; leave one of the two out"
    )


def transformer_fields(config: Config) -> dict[str, Any]:
    """Fields of Megatron-core's TransformerConfig."""
    return mlp.transformer_fields(config) | {
        "bias_activation_fusion": config.swiglu,  # bias + GELU is not fused for experts
        "num_moe_experts": config.num_experts,
        "expert_tensor_parallel_size": 1 if config.expert_model_parallel_size > 1 else None,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": config.moe_aux_loss_coeff,
        "moe_z_loss_coeff": config.moe_z_loss_coeff,
        "moe_token_dispatcher_type": config.moe_token_dispatcher_type,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "moe_permute_fusion": False,
    }


def fuses_bias_gelu(config: Config) -> bool:
    """Whether bias and GELU are fused into one kernel: not for experts."""
    return False


def linear_sites(config: Config, layer: int) -> tuple[LinearSite, ...]:
    """linear_fc1 and linear_fc2 of one expert."""
    return mlp.mlp_sites(config, layer, "mlp.experts", require(config.moe_ffn_hidden_size))


def sharding(config: Config) -> Sharding:
    """Copies are experts; tensor-parallel ranks shard each one, unless experts are spread over ranks."""
    experts, spread = require(config.num_experts), config.expert_model_parallel_size
    return Sharding(
        tensor_ranks=1 if spread > 1 else config.tensor_model_parallel_size,
        copies=experts,
        copies_on_rank=experts // spread,
        copies_per_token=config.moe_router_topk,
        experts=True,
    )


def other_weights(config: Config) -> int:
    """Weights of the router."""
    return require(config.num_experts) * require(config.hidden_size)


def activations(config: Config, runs: Runs | None) -> dict[str, float]:
    """Bytes saved for backward: --moe-router-topk experts per token, with a balanced load."""
    tensor = sharding(config).tensor_ranks
    # Ranks that shard each expert see the same tokens; else each rank sees its part of the sequence.
    tokens = tokens_of(config) * config.moe_router_topk / (config.tensor_model_parallel_size // tensor)
    width, ffn = width_of(config), require(config.moe_ffn_hidden_size) / tensor
    saved = {
        "input of the MLP": stream_bytes(config),
        "inputs of the experts": tokens * require(config.hidden_size) * width,
        "output of linear_fc1": tokens * ffn * width * mlp.gates(config),
        "input of linear_fc2": tokens * ffn * width,
        # Softmax and choice of the router, and the token permutation: int64 indices and fp32 probabilities.
        "routing": tokens * (3 * 8 + 4) + tokens_of(config) * require(config.num_experts) * (4 + width + 1),
    }
    if not config.swiglu:  # the multiplication by the router's probability is not fused
        saved["activation before the router's probability"] = tokens * ffn * width
    return saved


def backward_bytes(config: Config) -> float:
    """Bytes of the widest activation of one expert, for its share of the tokens under a balanced load; or of all."""
    share = config.moe_router_topk / require(config.num_experts) * config.expert_model_parallel_size
    if config.moe_grouped_gemm:
        share *= sharding(config).copies_on_rank
    ffn = require(config.moe_ffn_hidden_size)
    return tokens_of(config) * share * ffn * width_of(config) / sharding(config).tensor_ranks
