"""What cannot run is refused in one line, before anything starts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec import get_recipe
from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import find
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import (
    check_packages,
    resolve_model,
    resolve_recipe,
    resolve_run,
    virtual_stages,
)
from megatron_lowprec.training.data.tokenizer import tokenizer_of
from megatron_lowprec.training.memory.report import planned
from tests.refusal import refused
from tests.training.helpers import argv


def resolved(world_size: int = 1, **changes: Any) -> Config:
    return resolve_run(resolve_model(parse(argv(**changes))[0]), world_size, gpus=False)


def test_sizes_that_follow_from_others() -> None:
    config = resolved(hidden_size=96, num_attention_heads=3)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (384, 32, 3)
    assert config.max_position_embeddings == config.seq_length
    assert resolved(swiglu=True, hidden_size=192).ffn_hidden_size == 512


def test_global_batch_defaults_to_one_microbatch_a_rank() -> None:
    assert resolved(world_size=4, global_batch_size=None).global_batch_size == 8


def test_micro_batch_defaults_to_a_rank_s_share() -> None:
    assert resolved(world_size=2, micro_batch_size=None, global_batch_size=12).micro_batch_size == 6


def test_train_samples_count_whole_iterations() -> None:
    assert resolved(train_iters=None, train_samples=19).train_iters == 4
    # 2 samples, then 3 more a ramp's end at 8: 2 2 2 2 (8 samples), then 4s.
    ramped = resolved(train_iters=None, train_samples=20, micro_batch_size=1, rampup_batch_size=[2, 2, 8])
    assert ramped.train_iters == 4 + 3


def test_virtual_stages_by_either_flag() -> None:
    by_layers = resolved(2, num_layers=8, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2)
    by_chunks = resolved(2, num_layers=8, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    assert virtual_stages(by_layers) == virtual_stages(by_chunks) == 2
    whole = resolved(2, num_layers=8, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=4)
    assert virtual_stages(whole) is None


TE: dict[str, Any] = {"transformer_impl": "transformer_engine"}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TP4: dict[str, Any] = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
INTERLEAVED: dict[str, Any] = {
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
}
CHUNKS: dict[str, Any] = {"num_layers": 16, "pipeline_model_parallel_size": 2}
UNIFORM: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform"}
SAMPLES: dict[str, Any] = {"train_iters": None, "train_samples": 100}
EXPERTS: dict[str, Any] = {"num_experts": 4, "disable_bias_linear": True}
DISPATCH: dict[str, Any] = {**EXPERTS, "expert_model_parallel_size": 2, "moe_fp8_dispatch": True}
SIGMOID: dict[str, Any] = {**EXPERTS, "moe_router_score_function": "sigmoid"}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "position_embedding_type": "rope",
    "yarn_original_max_position_embeddings": 16,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": 32,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "position_embedding_type": "rope",
}
CASES: list[tuple[int, dict[str, Any], list[str]]] = [
    (1, {"num_layers": None}, ["--num-layers"]),
    (1, {"lr": None}, ["--lr"]),
    (1, {"micro_batch_size": None, "global_batch_size": None}, ["--global-batch-size"]),
    (2, {"micro_batch_size": None, "global_batch_size": 3}, ["--global-batch-size 3", "data-parallel size 2"]),
    (1, {"train_iters": None}, ["--train-iters"]),
    (1, {"train_iters": 0}, ["--train-iters 0"]),
    (1, {"hidden_size": 65}, ["--hidden-size 65", "--num-attention-heads 2"]),
    (1, {"group_query_attention": True, "num_query_groups": 3}, ["--num-query-groups 3"]),
    (1, {"swiglu": True, "squared_relu": True}, ["--swiglu", "--squared-relu"]),
    (1, {"max_position_embeddings": 16}, ["--max-position-embeddings 16"]),
    (1, {"position_embedding_init_std": -1.0}, ["--position-embedding-init-std -1.0"]),
    (
        1,
        {"position_embedding_init_std": 0.01, "position_embedding_type": "rope"},
        ["--position-embedding-init-std 0.01", "--position-embedding-type rope"],
    ),
    (
        1,
        {"position_embedding_init_std": 0.01, "init_method_std": 0.0},
        ["--position-embedding-init-std 0.01", "--init-method-std 0.0"],
    ),
    (1, {"no_lowprec_linears": True, "recipe": "mxfp8"}, ["--no-lowprec-linears", "mxfp8"]),
    (3, {"tensor_model_parallel_size": 2}, ["3 processes", "tensor 2"]),
    (4, {"tensor_model_parallel_size": 4}, ["--num-attention-heads 2", "--tensor-model-parallel-size 4"]),
    (2, {"pipeline_model_parallel_size": 2, "num_layers": 3}, ["--num-layers 3"]),
    (1, {"global_batch_size": 3}, ["--global-batch-size 3", "= 2"]),
    (2, {"global_batch_size": 6}, ["--global-batch-size 6", "data-parallel size 2", "= 4"]),
    (2, {"context_parallel_size": 2}, ["--context-parallel-size 2", "--transformer-impl transformer_engine"]),
    (2, {**TE, "context_parallel_size": 2, "seq_length": 30}, ["--seq-length 30", "2 x --context-parallel-size 4"]),
    (
        8,
        {**TE, "context_parallel_size": 2, "seq_length": 36, "num_attention_heads": 4, **TP4},
        ["--seq-length of a context-parallel rank, 18"],
    ),
    (1, {"fp8_param_gather": True}, ["--fp8-param-gather", "--use-distributed-optimizer"]),
    (1, {"fp8_param_gather": True, "use_distributed_optimizer": True}, ["--fp8-param-gather", "--bf16"]),
    (1, {**TE, "fp8_param_gather": True}, ["--fp8-param-gather", "--use-distributed-optimizer"]),
    (1, {**TE, "no_lowprec_linears": True}, ["--no-lowprec-linears", "--transformer-impl local"]),
    (1, {**TE, "attention_backend": "local"}, ["--attention-backend", "--transformer-impl local"]),
    (1, {"fp8_sequence_parallel_gather": True}, ["--fp8-sequence-parallel-gather", "--sequence-parallel"]),
    (2, {**TE, **TP2, "fp8_sequence_parallel_gather": True}, ["--fp8-sequence-parallel-gather", "local"]),
    (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 33}, ["--seq-length 33"]),
    (1, {"expert_model_parallel_size": 2}, ["--num-experts"]),
    (1, {"num_experts": 2, "expert_tensor_parallel_size": 2}, ["--expert-tensor-parallel-size 2", "1 rank(s)"]),
    (1, {"use_rope_scaling": True}, ["--use-rope-scaling", "--position-embedding-type rope"]),
    (1, {"rope_type": "yarn", "position_embedding_type": "rope"}, ["--yarn-original-max-position-embeddings"]),
    (1, {**YARN, "yarn_beta_slow": 0.0}, ["--yarn-beta-slow 0.0: wants above 0"]),
    (1, {**YARN, "yarn_beta_slow": 32.0}, ["--yarn-beta-fast 32 is not above --yarn-beta-slow 32"]),
    (1, {"position_embedding_type": "rope", "kv_channels": 15}, ["a head has 15", "give an even number"]),
    (1, {"position_embedding_type": "rope", "rotary_base": 1}, ["--rotary-base 1: wants above 1"]),
    (1, {"adam_beta2": 1.0}, ["--adam-beta2 1.0: wants at least 0 and below 1"]),
    (1, {"hidden_dropout": math.nan}, ["--hidden-dropout nan: wants at least 0 and below 1"]),
    (1, {**LATENT, "v_head_dim": 0}, ["--v-head-dim 0: wants at least 1"]),
    (1, {"num_layers": 10**9}, ["--num-layers 1000000000: wants at least 1 and at most 10000"]),
    (1, {"manual_gc_interval": 2}, ["--manual-gc-interval 2", "--manual-gc"]),
    (1, {"wandb_entity": "team"}, ["--wandb-entity team", "--wandb-project"]),
    (1, {**TE, "reset_attention_mask": True}, ["--reset-attention-mask", "--transformer-impl local"]),
    (
        1,
        {"sft": True, "mock_data": None, "data_path": ["a.jsonl"], "eod_mask_loss": True},
        ["--eod-mask-loss", "--sft"],
    ),
    (2, {"num_experts": 3, "expert_model_parallel_size": 2}, ["--num-experts 3"]),
    (2, {"tensor_model_parallel_size": 2, "num_experts": 2}, ["--sequence-parallel"]),
    (
        2,
        {"num_experts": 2, "expert_model_parallel_size": 2, "use_cpu_initialization": True},
        ["--use-cpu-initialization"],
    ),
    (1, {"num_virtual_stages_per_pipeline_rank": 2}, ["--pipeline-model-parallel-size"]),
    (2, {**CHUNKS, "num_layers_per_virtual_pipeline_stage": 3}, ["stage, 8", "-virtual-pipeline-stage 3"]),
    (2, {**CHUNKS, "num_layers_per_virtual_pipeline_stage": 16}, ["stage, 8", "-virtual-pipeline-stage 16"]),
    (2, {**CHUNKS, "num_layers_per_virtual_pipeline_stage": 0}, ["-virtual-pipeline-stage 0", "at least 1"]),
    (2, {**CHUNKS, "num_virtual_stages_per_pipeline_rank": -2}, ["-per-pipeline-rank -2", "at least 1"]),
    (1, {**UNIFORM, "recompute_num_layers": 0}, ["--recompute-num-layers 0", "at least 1"]),
    (1, {**UNIFORM, "num_layers": 5, "recompute_num_layers": 2}, ["chunk, 5", "--recompute-num-layers 2"]),
    (2, {**INTERLEAVED, **UNIFORM, "recompute_num_layers": 2}, ["chunk, 1", "--recompute-num-layers 2"]),
    (
        1,
        {"recompute_granularity": "selective", "recompute_num_layers": 1},
        ["--recompute-num-layers 1", "--recompute-granularity full"],
    ),
    (1, {"recompute_method": "uniform"}, ["--recompute-method uniform", "--recompute-granularity full"]),
    (2, {**INTERLEAVED, "global_batch_size": 6}, ["--global-batch-size 6", "pipeline stages", "4"]),
    (2, {**INTERLEAVED, **SAMPLES, "global_batch_size": 8, "rampup_batch_size": [4, 2, 8]}, ["INCREMENT 2", "4"]),
    (1, {"overlap_param_gather": True}, ["--use-distributed-optimizer"]),
    (1, {"recompute_granularity": "full"}, ["--recompute-method"]),
    (1, {"distributed_backend": "nccl"}, ["nccl", "GPU"]),
    (1, {"rampup_batch_size": [2, 2]}, ["START INCREMENT SAMPLES"]),
    (1, {"rampup_batch_size": [3, 2, 8]}, ["START", "3"]),
    # 2 2 2 2 | 4 4
    (1, {"rampup_batch_size": [2, 2, 8], "train_iters": 6}, ["--train-iters 6", "--train-samples instead, 16"]),
    (1, {"rampup_batch_size": [2, 2, 8], "train_iters": 3}, ["--train-iters 3", "--train-samples instead, 6"]),
    (1, {**SAMPLES, "rampup_batch_size": [2, 2, 8], "lr_decay_iters": 6}, ["--lr-decay-samples instead, 16"]),
    (1, {**SAMPLES, "rampup_batch_size": [2, 2, 8], "lr_warmup_iters": 1}, ["--lr-warmup-samples instead, 2"]),
    (1, {"min_lr": 1.0}, ["--min-lr"]),
    (1, {"lr_warmup_fraction": 2.0}, ["--lr-warmup-fraction 2.0", "at least 0 and at most 1"]),
    (1, {"clip_grad": -1.0}, ["--clip-grad -1.0", "at least 0"]),
    (1, {"num_query_groups": 3}, ["--num-query-groups 3", "--group-query-attention"]),
    (1, {"moe_router_topk": 1}, ["--moe-router-topk 1", "--num-experts"]),
    (1, {"moe_layer_freq": "2"}, ["--moe-layer-freq 2", "--num-experts"]),
    (1, {"moe_fp8_dispatch": True}, ["--moe-fp8-dispatch", "--num-experts"]),
    (2, {**DISPATCH, "expert_model_parallel_size": 1}, ["--moe-fp8-dispatch", "--expert-model-parallel-size 1"]),
    (2, {**DISPATCH, "moe_token_dispatcher_type": "allgather"}, ["--moe-fp8-dispatch", "allgather", "alltoall"]),
    (2, {**DISPATCH, "no_lowprec_linears": True}, ["--moe-fp8-dispatch", "--no-lowprec-linears"]),
    (2, {**DISPATCH, "log_quantization_interval": 2}, ["--log-quantization-interval", "--moe-fp8-dispatch"]),
    (2, {**DISPATCH, "capture_step": [1], "capture_layers": ["*"]}, ["--capture-step", "--moe-fp8-dispatch"]),
    (1, {**EXPERTS, "moe_layer_freq": "[1]*3", "num_layers": 1}, ["a pattern of 3 layers", "such as [1]"]),
    (1, {**EXPERTS, "moe_layer_freq": "1" * 5000}, ["no such pattern"]),
    (1, {**EXPERTS, "moe_layer_freq": f"[1]*{'1' * 5000}"}, ["no such pattern"]),
    (1, {**EXPERTS, "moe_layer_freq": "[0]*2"}, ["--moe-layer-freq [0]*2", "no layer with experts"]),
    (1, {"num_experts": 4, "moe_shared_expert_intermediate_size": 64}, ["--disable-bias-linear"]),
    (1, {**EXPERTS, "moe_router_topk_scaling_factor": 2.5}, ["--moe-router-score-function sigmoid"]),
    (1, {**EXPERTS, "moe_router_enable_expert_bias": True}, ["--moe-router-score-function sigmoid"]),
    (1, {**EXPERTS, "moe_router_bias_update_rate": 0.1}, ["--moe-router-enable-expert-bias"]),
    (1, {**SIGMOID, "moe_router_pre_softmax": True}, ["--moe-router-pre-softmax", "sigmoid"]),
    (1, {**EXPERTS, "moe_router_topk": 1}, ["--moe-router-topk 1", "--moe-router-pre-softmax"]),
    (1, {**EXPERTS, "moe_router_num_groups": 2}, ["--moe-router-group-topk"]),
    (1, {**EXPERTS, "moe_router_num_groups": 3, "moe_router_group_topk": 1}, ["--num-experts 4", "3"]),
    (1, {**EXPERTS, "moe_router_num_groups": 1, "moe_router_group_topk": 2}, ["--moe-router-group-topk 2 is more"]),
    (1, {"kv_lora_rank": 32}, ["--kv-lora-rank 32", "--multi-latent-attention"]),
    (1, {"multi_latent_attention": True, "kv_lora_rank": 32}, ["--qk-head-dim, --qk-pos-emb-head-dim, --v-head-dim"]),
    (1, {**LATENT, "position_embedding_type": "learned_absolute"}, ["--position-embedding-type rope"]),
    (1, {**LATENT, "attention_backend": "local"}, ["--attention-backend auto"]),
    (1, {**LATENT, "qk_pos_emb_head_dim": 7}, ["--qk-pos-emb-head-dim 7"]),
    (1, {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn", "moe_router_pre_softmax": True}, ["sinkhorn"]),
    (1, {**EXPERTS, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, ["coeff 0.1", "none"]),
    (
        1,
        {**EXPERTS, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
        ["--moe-router-num-groups 4", "best 2"],
    ),
    (2, {**LATENT, "tensor_model_parallel_size": 2}, ["--multi-latent-attention", "--sequence-parallel"]),
    (2, {**LATENT, **TP2, "kv_lora_rank": 33}, ["--kv-lora-rank + --qk-pos-emb-head-dim 41"]),
    (1, {"memory_plan_gpus": 8}, ["--memory-plan-gpus 8", "--memory-plan"]),
    (1, {"memory_plan": True, "memory_plan_gpus": 0}, ["--memory-plan-gpus 0", "at least 1"]),
    (1, {"finetune": True}, ["--finetune", "--load"]),
    (1, {"split": "a,b,c"}, ["--split a,b,c", "969,30,1"]),
    (1, {"split": "0,0,0"}, ["--split 0,0,0", "not all 0"]),
    (1, {"split": "90,-10"}, ["--split 90,-10"]),
    (1, {"split": "1,1,1,1"}, ["--split 1,1,1,1", "up to three"]),
    (1, {"split": "nan,1"}, ["--split nan,1"]),
    (1, {"split": "9e2,1"}, ["--split 9e2,1"]),  # Megatron-core reads 9, 2 and 1
    (1, {"split": "1_0,5"}, ["--split 1_0,5"]),
    (1, {"tokenizer_model": "m"}, ["--tokenizer-model m", "HuggingFaceTokenizer", "NullTokenizer"]),
    (1, {"start_weight_decay": 0.1}, ["--start-weight-decay 0.1", "--weight-decay-incr-style linear or cosine"]),
    (1, {"lr_wsd_decay_iters": 3}, ["--lr-wsd-decay-iters 3", "--lr-decay-style WSD"]),
    (1, {"lr_warmup_init": 1e-5}, ["--lr-warmup-init 1e-05", "--lr-warmup-iters"]),
    (1, {"log_interval": 0}, ["--log-interval 0"]),
    (1, {"mock_data": None}, ["--data-path"]),
    (1, {"vocab_size": None}, ["--vocab-size"]),
    (1, {"tokenizer_type": "GPT2BPETokenizer"}, ["--vocab-file"]),
    (1, {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "none.json", "merge_file": "m"}, ["none.json", "no such"]),
]


@pytest.mark.parametrize(("world_size", "changes", "words"), CASES)
def test_refusals(world_size: int, changes: dict[str, Any], words: list[str]) -> None:
    with refused(*words):
        resolved(world_size, **changes)


@pytest.mark.parametrize(
    ("recipe", "option"),
    [
        ("fp8_lm", "--use-distributed-optimizer"),
        ("fp8_lm_o3", "--use-distributed-optimizer"),
        ("fp8_lm_o3", "--fp8-param-gather"),
        ("deepseek_v3", "--fp8-param-gather"),
    ],
)
def test_what_a_recipe_needs_is_switched_on_but_not_against_a_flag(recipe: str, option: str) -> None:
    words = argv(recipe=recipe, bf16=True, swiglu=True, ffn_hidden_size=128)
    config, given, _ = parse(words)
    config, notes = resolve_recipe(resolve_model(config), get_recipe(recipe), given)
    assert f"recipe {recipe}: {option} is on, which it needs" in notes
    off = option.replace("--", "--no-")
    config, given, _ = parse([*words, off])
    with pytest.raises(UserError, match=f"{off} was given, but recipe {recipe} needs {option}: leave one of the two"):
        resolve_recipe(resolve_model(config), get_recipe(recipe), given)


def test_as_many_query_groups_as_heads_are_plain_attention() -> None:
    assert resolved(num_query_groups=2).num_query_groups == 2  # as converted models say it


def test_wandb_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"megatron-lowprec\[wandb\]"):
        check_packages(resolved(wandb_project="p"))


def test_a_memory_plan_needs_no_package_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made on a laptop or a login node for another machine."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = argv(**TE, recipe="fp8_delayed", bf16=True, wandb_project="p", memory_plan=True, seq_length=64)
    config = resolve_model(parse(flags)[0])
    lines = planned(config, get_recipe("fp8_delayed"), 1, None)
    assert any("memory plan of one of 1 GPUs" in line for line in lines)


def test_sequence_parallelism_on_one_rank_is_off() -> None:
    """Scripts give it for all sizes; the driver notes it."""
    assert not resolved(sequence_parallel=True).sequence_parallel


def test_shipped_files_are_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse(["--recipe", "bf16"])[0]
    config = resolve_run(resolve_model(replace(config, train_iters=1)), 1, gpus=False)
    assert config.vocab_file is not None
    assert find(config.vocab_file).exists()
    assert tokenizer_of(config).vocab_size == 512
    assert config.train_data_path is not None
    assert Path(config.train_data_path[0]).exists()


@pytest.mark.parametrize(
    ("installed", "gpus", "words"),
    [(False, True, "pip install --no-build-isolation 'transformer-engine[pytorch]==2.20.2'"), (True, False, "GPUs")],
)
def test_transformer_engine_that_is_not_there_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch, installed: bool, gpus: bool, words: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    config = resolve_model(parse(argv(**TE))[0])
    with refused(words):
        check_packages(resolve_run(config, 1, gpus=gpus))
