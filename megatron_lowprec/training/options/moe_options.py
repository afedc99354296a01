"""Flags of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.training.options.declaration import Group, Part, arg

_BALANCED = "moe_router_load_balancing_type=aux_loss|seq_aux_loss|none"  # Sinkhorn's router ignores them


@dataclass(frozen=True)
class MoeOptions(Group):
    """mixture of experts"""

    PART = Part.UPDATE
    NEEDS = "num_experts"

    num_experts: int | None = arg(None, "experts of a layer; default: a dense MLP", Part.SHAPE, least=1)
    moe_ffn_hidden_size: int | None = arg(None, "width of one expert; default --ffn-hidden-size", Part.SHAPE, least=1)
    moe_layer_freq: str = arg(
        "1",
        "layers with experts, others are dense: N for every Nth from the first, or a pattern as ([0]*1+[1]*26)",
        Part.SHAPE,
    )
    moe_shared_expert_intermediate_size: int | None = arg(
        None, "width of the shared experts together, through which every token goes; default: none", Part.SHAPE, least=1
    )
    moe_router_topk: int = arg(2, "experts that a token goes to", Part.FUNCTION, least=1)
    moe_router_score_function: Literal["softmax", "sigmoid"] = arg(
        "softmax", "how logits become scores", Part.FUNCTION, needs=_BALANCED
    )
    moe_router_pre_softmax: bool = arg(
        False,
        "softmax over all experts, not only over the chosen ones",
        Part.FUNCTION,
        needs=f"{_BALANCED} moe_router_score_function=softmax",
    )
    moe_router_topk_scaling_factor: float | None = arg(
        None,
        "factor of the scores; needs --moe-router-score-function sigmoid or --moe-router-pre-softmax",
        Part.FUNCTION,
        above=0,
        needs=_BALANCED,
    )
    moe_router_num_groups: int | None = arg(
        None, "groups of experts; with --moe-router-group-topk", Part.FUNCTION, least=1, needs=_BALANCED
    )
    moe_router_group_topk: int | None = arg(
        None,
        "groups that a token may go to, those with the best sums of their best scores (node-limited routing)",
        Part.FUNCTION,
        least=1,
        needs=_BALANCED,
    )
    moe_router_enable_expert_bias: bool = arg(
        False,
        "balance the load by a bias of each expert in the choice, moved after each step (sigmoid scores)",
        Part.FUNCTION,
        needs=f"{_BALANCED} moe_router_score_function=sigmoid",
    )
    moe_router_bias_update_rate: float = arg(
        1e-3, "how far a step moves that bias", least=0, needs="moe_router_enable_expert_bias"
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none"] = arg(
        "aux_loss", "how the load is balanced; seq_aux_loss: aux_loss of each sequence"
    )
    moe_aux_loss_coeff: float = arg(
        0.0,
        "weight of the load-balancing loss; 1e-2 is a good start",
        least=0,
        needs="moe_router_load_balancing_type=aux_loss|seq_aux_loss",
    )
    moe_z_loss_coeff: float | None = arg(None, "weight of the router's z-loss", least=0)
    moe_router_dtype: Literal["fp32", "fp64"] | None = arg(
        None, "dtype of the router's product; default: the model's", Part.FUNCTION
    )
    moe_grouped_gemm: bool = arg(
        False, "run the experts of a layer in one call per GEMM", Part.EXECUTION, needs="transformer_impl=local"
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = arg("alltoall", "how tokens reach their experts")
    moe_fp8_dispatch: bool = arg(
        False,
        "send tokens to experts as the codes that linear_fc1 takes, and gradients as those that linear_fc2 takes; "
        "needs --expert-model-parallel-size above 1 and block or row scales (fp8_blockwise, fp8_rowwise, mxfp8)",
        needs="moe_token_dispatcher_type=alltoall transformer_impl=local !no_lowprec_linears "
        "!log_quantization_interval !capture_step",
    )


@dataclass(frozen=True, kw_only=True)
class Experts(MoeOptions):
    """A mixture of experts with its sizes."""

    num_experts: int
    moe_ffn_hidden_size: int
