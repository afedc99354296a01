"""Models of this driver for the conversions' tests: checkpoints of a few steps, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_lowprec.training.checkpoint import loader
from megatron_lowprec.training.distributed import startup
from tests.training.helpers import argv

# Weights that are far from their start, and dropout that a forward pass must not have.
COMMON: dict[str, Any] = {"train_iters": 12, "lr": 0.05, "init_method_std": 0.2, "lr_decay_style": "constant"}
GPT: dict[str, Any] = {**COMMON, "vocab_size": 200, "norm_epsilon": 1e-3}
LLAMA: dict[str, Any] = {
    **COMMON,
    "vocab_size": 200,
    "num_attention_heads": 4,
    "kv_channels": 24,  # not hidden / heads
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-3,
    "swiglu": True,
    "ffn_hidden_size": 96,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
QWEN2: dict[str, Any] = {**LLAMA, "add_qkv_bias": True}
QWEN3: dict[str, Any] = {**LLAMA, "qk_layernorm": True}
# With 24 channels of a head and base 500, waves of both scalings are short, long and between.
LLAMA3: dict[str, Any] = {**LLAMA, "rotary_base": 500_000, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
YARN: dict[str, Any] = {
    **LLAMA,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 2.0,
    "yarn_beta_slow": 0.5,
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "num_experts": 8,
    "moe_ffn_hidden_size": 48,  # not the unused width of a dense MLP
    "moe_router_topk": 3,
    "moe_aux_loss_coeff": 0.01,
}
DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "vocab_size": 200,
    "num_layers": 3,
    "num_attention_heads": 4,
    "multi_latent_attention": True,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "ffn_hidden_size": 96,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "num_experts": 8,
    "moe_layer_freq": "([0]*1+[1]*2)",
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,  # so that it decides
    "moe_router_dtype": "fp32",
}
IDS = torch.randint(0, 200, (3, 32), generator=torch.Generator().manual_seed(5))


def arguments(model: dict[str, Any], **changes: Any) -> list[str]:
    return argv(**{**model, **changes})


def our_logits(folder: str | Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    """[batch, sequence, padded vocabulary] of a checkpoint, in this process as a world of one."""
    found = loader.find(str(folder))
    ranks = startup.prepare_environment()
    opened = loader.reopen(found, 1, gpus=False)
    startup.initialize(opened.config, ranks)

    from megatron_lowprec.training.checkpoint import checkpoint
    from megatron_lowprec.training.model import build_model

    model = build_model(opened.config, opened.recipe, opened.padded_vocab_size)
    checkpoint.load_weights(found.folder, model)
    (chunk,) = model.chunks
    chunk.eval()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        out = chunk(ids, positions, None)
    startup.finalize()
    return out.float()
