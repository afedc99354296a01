"""Small runs that are compared with and without CUDA graphs: their options, and what must be equal in their metrics."""

from __future__ import annotations

from typing import Any

GRAPHS: dict[str, Any] = {"cuda_graph_impl": "local"}
EAGER: dict[str, Any] = {"cuda_graph_impl": "none"}

SMALL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 64,
    "seq_length": 32,
    "train_iters": 5,
    "eval_iters": 1,
    "eval_interval": 2,
    "bf16": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "global_batch_size": 4,
    "no_save": True,
}
# of a row of the metrics, exact
KEYS = (
    *("lm loss hex", "lm loss validation hex", "lm loss test hex"),
    *("grad-norm", "params-norm", "skipped iterations"),
)

PHASES: dict[str, Any] = {"recipe": "fp8_delayed", "recipe_override": "phases=[{from_step: 2, fprop: bf16}]"}

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
# whose norms find amaxes, whose layers compute and cast again, and whose vocabulary adds its gradients
LARGE_LLAMA: dict[str, Any] = {
    "swiglu": True,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "save_memory": True,
}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_delayed": {"recipe": "fp8_delayed"},
    "overlapped": {"recipe": "fp8_current", **OVERLAP},
    "primary weights": {"recipe": "fp8_current", "fp8_param_gather": True, **OVERLAP},
    "primary weights, transposed each time": {
        "recipe": "fp8_current",
        "fp8_param_gather": True,
        "no_cache_weights": True,
        **OVERLAP,
    },
    "stochastic, three microbatches": {"recipe": "mxfp4_rht_sr", "global_batch_size": 6},
    "one microbatch": {"recipe": "mxfp4_rht_sr", "global_batch_size": 2},
    "rounded gradients": {"recipe": "fp8_delayed", "no_gradient_accumulation_fusion": True},
    "bf16 gradients": {"grad_reduce_in_bf16": True},
    "fp32, megatron-core's attention": {"bf16": None, "attention_backend": "local"},
    "llama": {"swiglu": True, "disable_bias_linear": True, "position_embedding_type": "rope"},
    "llama, as from 1e9 parameters on": {**LARGE_LLAMA, "recipe": "fp8_current", "fp8_param_gather": True, **OVERLAP},
    "llama, as from 1e9 parameters on, emulated": {**LARGE_LLAMA, "recipe": "mxfp4_rht_sr"},
    "stock linears": {"no_lowprec_linears": True},
    "stored gradients": {"recipe": "fp8_lm_o2", "global_batch_size": 2},
    "stored gradients, fp8 weights": {"recipe": "fp8_lm_o3", "global_batch_size": 2, **OVERLAP},
    "stored gradients, two microbatches": {
        "recipe": "fp8_lm_o2",
        "recipe_override": "gradients.accumulation=format",
    },
}
EACH_TIME = [
    "bf16",
    "fp8_delayed",
    "stochastic, three microbatches",
    "fp32, megatron-core's attention",
    "stock linears",
    "stored gradients",
]

ON_GPU: dict[str, Any] = SMALL | {"hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "train_iters": 6}
ON_GPU |= {"deterministic_mode": True, "log_params_norm": True}
RECIPES = ["bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp4_rht_sr"]
