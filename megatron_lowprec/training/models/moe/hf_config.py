"""Mixtral's config.json: Llama with experts in all layers, a softmax over the chosen ones, and no shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common.hf_options import completed, differing_options
from megatron_lowprec.training.models.llama import hf_config as llama

MODEL_TYPE, TITLE = "mixtral", "Mixtral"
OPTIONS: Mapping[str, Any] = {name: value for name, value in llama.OPTIONS.items() if name != "num_experts"} | {
    "moe_layer_freq": "1",
    "moe_shared_expert_intermediate_size": None,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
}
VARIANTS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "router_jitter_noise": (0.0,),
}
_NOT_MIXTRAL = ("attention_bias", "mlp_bias")
DEFAULTS: Mapping[str, Any] = {
    **llama.DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
ALIASES: Mapping[str, str] = {"num_experts": "num_local_experts"}


def differing(config: Config) -> list[str]:
    """Options that Mixtral does not support."""
    found = differing_options(config, OPTIONS)
    if not config.num_experts:
        found.append("a dense MLP in all layers")
    if config.moe_router_load_balancing_type == "sinkhorn":  # its scores are not those of the softmax
        found.append("--moe-router-load-balancing-type sinkhorn")
    return found


def to_config(config: Config) -> dict[str, Any]:
    """Entries of config.json besides those of every architecture."""
    shared = {name: value for name, value in llama.to_config(config).items() if name not in _NOT_MIXTRAL}
    return shared | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": MODEL_TYPE,
        "intermediate_size": config.moe_ffn_hidden_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


def from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Config; ``resolve_model`` fills derived sizes.

    Raises:
        UserError: one expert a token, which Megatron-core does not weight by a softmax over the chosen ones.
    """
    hf = completed(hf, DEFAULTS, ALIASES)
    if hf["num_experts_per_tok"] == 1:
        raise UserError(
            "config.json has num_experts_per_tok 1, whose softmax over the chosen expert gives it the weight 1; "
            "Megatron-core has no such router, and only models with 2 or more can be read"
        )
    return llama.from_config(hf) | {
        "moe_ffn_hidden_size": hf["intermediate_size"],
        "num_experts": hf["num_local_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
    }
