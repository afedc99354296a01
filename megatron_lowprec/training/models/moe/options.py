"""Flags of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lowprec.training.config.fields import arg


@dataclass(frozen=True)
class MoeOptions:
    """mixture of experts"""

    num_experts: int | None = arg(None, "experts of a layer; default: a dense MLP")
    moe_ffn_hidden_size: int | None = arg(None, "width of one expert; default --ffn-hidden-size")
    moe_router_topk: int = arg(2, "experts that a token goes to")
    moe_router_load_balancing_type: Literal["aux_loss", "sinkhorn", "none"] = arg(
        "aux_loss", "how the load is balanced"
    )
    moe_aux_loss_coeff: float = arg(0.0, "weight of the load-balancing loss; 1e-2 is a good start")
    moe_z_loss_coeff: float | None = arg(None, "weight of the router's z-loss")
    moe_grouped_gemm: bool = arg(False, "run the experts of a layer in one call per GEMM")
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = arg("alltoall", "how tokens reach their experts")
