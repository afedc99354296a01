"""The mixture of experts: a router, and MLPs of which each token passes through a few, and through the shared ones.

Layers without experts have a dense MLP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import LinearSite
from megatron_lowprec.training.config.fields import check_divisible
from megatron_lowprec.training.config.options import Config, options_in
from megatron_lowprec.training.models.common import mlp
from megatron_lowprec.training.models.common.interface import Sharding
from megatron_lowprec.training.models.common.layer_pattern import canonical_pattern, has_experts, layers_with_experts
from megatron_lowprec.training.models.common.rank_sizes import expert_tensor_ranks, stream_entries, tokens_of, width_of
from megatron_lowprec.training.models.common.saved_tensor import SavedTensor
from megatron_lowprec.training.options.declaration import Part
from megatron_lowprec.training.options.moe_options import Experts, MoeOptions

_EXPERTS, _SHARED = "mlp.experts", "mlp.shared_experts"
_OURS = ("num_experts", "moe_fp8_dispatch")  # all others are fields of Megatron-core's TransformerConfig


def resolve(config: Config) -> Config:
    """The options with --ffn-hidden-size filled, and --moe-ffn-hidden-size, which defaults to it."""
    config = mlp.resolve(config)
    config = replace(config, moe_ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size)
    experts = config.experts.num_experts
    if config.moe_router_topk > experts:
        raise UserError(f"--moe-router-topk {config.moe_router_topk} is more than --num-experts {experts}; lower it")
    if not any(layers_with_experts(config)):
        raise UserError(f"--moe-layer-freq {config.moe_layer_freq} leaves no layer with experts")
    if config.moe_shared_expert_intermediate_size and not config.disable_bias_linear:
        raise UserError("shared experts have no biases; add --disable-bias-linear")
    _check_router(config.experts)
    return replace(config, moe_layer_freq=canonical_pattern(config))


def _check_router(experts: Experts) -> None:
    """Reject options of the router that Megatron-core refuses or ignores."""
    sigmoid = experts.moe_router_score_function == "sigmoid"
    groups, chosen = experts.moe_router_num_groups, experts.moe_router_group_topk
    if experts.moe_router_topk_scaling_factor is not None and not (sigmoid or experts.moe_router_pre_softmax):
        raise UserError(
            f"--moe-router-topk-scaling-factor {experts.moe_router_topk_scaling_factor} needs "
            "--moe-router-score-function sigmoid or --moe-router-pre-softmax; add one of them"
        )
    scores_sum_to_one = not (sigmoid or experts.moe_router_pre_softmax)
    if experts.moe_router_topk == 1 and scores_sum_to_one and experts.moe_router_load_balancing_type != "sinkhorn":
        raise UserError("--moe-router-topk 1 gives every token the weight 1; add --moe-router-pre-softmax")
    if (groups is None) != (chosen is None):
        raise UserError("--moe-router-num-groups and --moe-router-group-topk belong together; give both or neither")
    if groups is not None and chosen is not None:
        check_divisible("--num-experts", experts.num_experts, "--moe-router-num-groups", groups)
        check_divisible("--moe-router-topk", experts.moe_router_topk, "--moe-router-group-topk", chosen)
        a_group, wanted = experts.num_experts // groups, experts.moe_router_topk // chosen
        if a_group < wanted:
            raise UserError(
                f"--moe-router-topk {experts.moe_router_topk} ranks groups by their best {wanted} scores, and each of "
                f"--moe-router-num-groups {groups} has {a_group}; lower --moe-router-num-groups"
            )
        if chosen > groups:
            raise UserError(f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}; lower it")


def check_parallelism(config: Config, data_parallel_size: int) -> None:
    """Reject an expert-parallel size that does not divide experts and ranks, and layouts that Megatron-core lacks."""
    tensor, expert = config.tensor_model_parallel_size, config.expert_model_parallel_size
    check_divisible("--num-experts", config.experts.num_experts, "--expert-model-parallel-size", expert)
    check_divisible("the data-parallel size", data_parallel_size, "--expert-model-parallel-size", expert)
    given, sharing = config.expert_tensor_parallel_size, expert_tensor_ranks(config)
    if given not in (None, sharing):
        raise UserError(
            f"--expert-tensor-parallel-size {given}: here {sharing} rank(s) share an expert, 1 with "
            "--expert-model-parallel-size above 1, else --tensor-model-parallel-size; leave the flag out"
        )
    shared = config.moe_shared_expert_intermediate_size
    if shared:
        check_divisible("--moe-shared-expert-intermediate-size", shared, "--tensor-model-parallel-size", tensor)
    if tensor > 1 and not config.sequence_parallel:
        raise UserError("experts with --tensor-model-parallel-size above 1 need --sequence-parallel")
    if tensor > 1 and not config.disable_bias_linear:
        raise UserError("experts with --tensor-model-parallel-size above 1 have no biases; add --disable-bias-linear")
    if expert == 1 and config.moe_fp8_dispatch:
        raise UserError(
            "--moe-fp8-dispatch does nothing at --expert-model-parallel-size 1, where no token travels; raise the "
            "size, or leave the flag out"
        )
    if expert > 1 and config.use_cpu_initialization:
        raise UserError("--use-cpu-initialization would give every expert-parallel rank the same experts; leave it out")


def graph_obstacle(config: MoeOptions) -> str | None:
    """The router determines an expert's number of tokens."""
    return f"the sizes of --num-experts {config.num_experts} follow the router"


def transformer_fields(config: Config) -> dict[str, Any]:
    """Fields of Megatron-core's TransformerConfig."""
    pattern = layers_with_experts(config)
    same = {name: getattr(config, name) for name in options_in(*Part, groups=(MoeOptions,)) if name not in _OURS}
    return mlp.transformer_fields(config) | {
        **same,
        # Megatron-core fuses for experts neither GELU with a bias nor SwiGLU with one
        "bias_activation_fusion": config.swiglu and config.disable_bias_linear,
        "num_moe_experts": config.num_experts,
        "expert_tensor_parallel_size": 1 if config.expert_model_parallel_size > 1 else None,
        # a list has Megatron-core name each layer's tensors on their own in checkpoints
        "moe_layer_freq": 1 if all(pattern) else [int(experts) for experts in pattern],
        "moe_permute_fusion": False,
    }


def fuses_activation(config: Config) -> bool:
    """Whether one kernel computes the activation: not for experts."""
    return False


def linear_sites(config: Config, layer: int) -> tuple[LinearSite, ...]:
    """linear_fc1 and linear_fc2 of one expert, and of the shared experts; of a dense layer its own."""
    if not has_experts(config, layer):
        return mlp.linear_sites(config, layer)
    sites = mlp.mlp_sites(config.shape, layer, _EXPERTS, config.experts.moe_ffn_hidden_size)
    if config.moe_shared_expert_intermediate_size:
        sites += mlp.mlp_sites(config.shape, layer, _SHARED, config.moe_shared_expert_intermediate_size)
    return sites


def sharding(config: Config, site: LinearSite) -> Sharding:
    """Copies are experts; tensor-parallel ranks shard each one, unless experts are spread over ranks."""
    if not site.name.startswith(f"{_EXPERTS}."):
        return mlp.sharding(config, site)
    experts = config.experts.num_experts
    return Sharding(
        tensor_ranks=expert_tensor_ranks(config),
        copies=experts,
        copies_on_rank=experts // config.expert_model_parallel_size,
        copies_per_token=config.moe_router_topk,
        experts=True,
    )


def other_weights(config: Config, layer: int) -> int:
    """Weights of the router."""
    return config.experts.num_experts * config.shape.hidden_size if has_experts(config, layer) else 0


def activations(config: Config, layer: int) -> list[SavedTensor]:
    """Tensors of --moe-router-topk experts per token, with a balanced load, and of the shared experts."""
    if not has_experts(config, layer):
        return mlp.activations(config, layer)
    tensor, experts = expert_tensor_ranks(config), config.experts
    # Ranks that shard each expert see the same tokens; else each rank sees its part of the sequence.
    tokens = tokens_of(config) * config.moe_router_topk / (config.tensor_model_parallel_size // tensor)
    wide = tokens * (experts.moe_ffn_hidden_size / tensor)
    saved = [
        SavedTensor("input of the MLP", stream_entries(config)),
        SavedTensor(
            "inputs of the experts",
            tokens * config.shape.hidden_size,
            input_of=f"{_EXPERTS}.linear_fc1",
            dispatched=config.moe_fp8_dispatch,
        ),
        *mlp.around_activation(config, _EXPERTS, wide),
        # Token permutation: int64 indices and fp32 probabilities; softmax and choice of the router.
        SavedTensor("routing", tokens, width=3 * 8 + 4),
        SavedTensor("routing", tokens_of(config) * experts.num_experts, width=4 + width_of(config) + 1),
    ]
    if not config.swiglu:  # the multiplication by the router's probability is not fused
        saved.append(SavedTensor("activation before the router's probability", wide))
    if config.moe_shared_expert_intermediate_size:  # their input is the MLP's
        wide = tokens_of(config) * config.moe_shared_expert_intermediate_size / config.tensor_model_parallel_size
        shared = mlp.around_activation(config, _SHARED, wide)
        saved += [replace(one, name="shared experts", in_format="shared experts") for one in shared]
    return saved


def backward_bytes(config: Config) -> float:
    """Bytes of the widest activation under a balanced load: of an expert, of all here if grouped, or of others."""
    share = config.moe_router_topk / config.experts.num_experts * config.expert_model_parallel_size
    if config.moe_grouped_gemm:
        share *= config.experts.num_experts // config.expert_model_parallel_size
    ffn = config.experts.moe_ffn_hidden_size * share / expert_tensor_ranks(config)
    tensor = config.tensor_model_parallel_size
    others = [ffn, (config.moe_shared_expert_intermediate_size or 0) / tensor]
    if not all(layers_with_experts(config)):
        others.append(config.shape.ffn_hidden_size / tensor)
    return tokens_of(config) * max(others) * width_of(config)
