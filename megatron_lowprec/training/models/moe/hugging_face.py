"""Mixtral: Llama with experts in all layers, a softmax over the chosen ones, and no shared experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.models.common import llama_like
from megatron_lowprec.training.models.common.hugging_face import TensorMap
from megatron_lowprec.training.models.common.llama_like import ACTIVATION, LLAMA, OPTIONS
from megatron_lowprec.training.models.common.llama_tensors import attention_maps, decoder_maps, gated_mlp_maps
from megatron_lowprec.training.options.moe_options import MoeOptions


def _unsupported(config: MoeOptions) -> list[str]:
    found = [] if config.num_experts else ["a dense MLP in all layers"]
    if config.moe_router_load_balancing_type == "sinkhorn":  # its scores are not those of the softmax
        found.append("--moe-router-load-balancing-type sinkhorn")
    return found


def _from_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Llama's; UserError for one expert a token, which Megatron-core does not weight by a softmax over the chosen."""
    if hf["num_experts_per_tok"] == 1:
        raise UserError(
            "config.json has num_experts_per_tok 1, whose softmax over the chosen expert gives it the weight 1; "
            "Megatron-core has no such router, and only models with 2 or more can be read"
        )
    return llama_like.from_config(hf)


def _tensor_maps(config: Config) -> Iterator[TensorMap]:
    """A router, and experts one by one."""

    def parts(layer: int, ours: str, theirs: str) -> Iterator[TensorMap]:
        yield from attention_maps(config.shape, ours, theirs)
        block = f"{theirs}.block_sparse_moe"
        yield TensorMap(f"{ours}.mlp.router.weight", (f"{block}.gate.weight",))
        for expert in range(config.experts.num_experts):
            here, there = f"{ours}.mlp.experts.local_experts.{expert}", f"{block}.experts.{expert}"
            yield from gated_mlp_maps(here, there, ("w1", "w3", "w2"))

    return decoder_maps(config.shape, parts)


MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    title="Mixtral",
    class_name="MixtralForCausalLM",
    options={
        **OPTIONS,
        "moe_layer_freq": "1",
        "moe_shared_expert_intermediate_size": None,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_num_groups": None,
        "moe_router_enable_expert_bias": False,
    },
    keys={
        **LLAMA.keys,
        "moe_ffn_hidden_size": "intermediate_size",  # written in place of the width of a dense MLP
        "num_experts": "num_local_experts",
        "moe_router_topk": "num_experts_per_tok",
    },
    variants={**ACTIVATION, "sliding_window": (None,), "router_jitter_noise": (0.0,)},
    defaults={
        **LLAMA.defaults,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"num_experts": "num_local_experts"},
    tensor_maps=_tensor_maps,
    unsupported=_unsupported,
    from_config=_from_config,
)
