"""The memory plan against what a model really keeps, in one process and in two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.memory.plan import plan
from megatron_lowprec.training.memory.weights import stage_weights
from tests.launch import fork_ranks
from tests.once import once
from tests.training.conftest import Drive, take_down
from tests.training.memory.memory_worker import VOCABULARY, measure
from tests.training.memory.plans import small

# None has RMSNorm: torch's, which a CPU runs, saves tensors that the kernel of a GPU, and so the plan, does not.
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "fp32": {"bf16": None},
    "recipe": {"recipe": "mxfp8"},
    "unfused attention": {"attention_backend": "local"},
    "grouped queries": {"group_query_attention": True, "num_query_groups": 2},
    "llama": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "swiglu": True,
        "ffn_hidden_size": 256,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    },
    "nemotron": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "squared_relu": True,
        "kv_channels": 64,
        "disable_bias_linear": True,
    },
    "experts": {"num_experts": 4, "squared_relu": True, "disable_bias_linear": True, "moe_ffn_hidden_size": 192},
    "gated experts": {"num_experts": 4, "swiglu": True, "disable_bias_linear": True, "moe_ffn_hidden_size": 192},
    "dense and shared experts": {
        "num_layers": 3,
        "num_experts": 4,
        "moe_layer_freq": "([0]*1+[1]*2)",
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "swiglu": True,
        "disable_bias_linear": True,
    },
    "norms of queries and keys": {"qk_layernorm": True, "group_query_attention": True, "num_query_groups": 2},
    "latent attention": {
        "multi_latent_attention": True,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_head_dim": 24,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 32,  # another width than of keys has the math kernel on a CPU, which saves the scores
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
    },
    "grouped experts": {
        "num_experts": 4,
        "squared_relu": True,
        "disable_bias_linear": True,
        "moe_ffn_hidden_size": 192,
        "moe_grouped_gemm": True,
    },
    "selective recompute": {"recompute_granularity": "selective", "attention_backend": "local"},
    "full recompute": {
        "num_layers": 4,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "full recompute of some": {
        "num_layers": 4,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
    },
}


def expected_saved(config: Config, gpus: int = 1) -> float:
    """What the plan says is kept, and the softmax of the logits in fp32, which is what cross-entropy saves."""
    found = plan(config, load_recipe(config.recipe, config.recipe_override), VOCABULARY, gpus, arch="cpu")
    logits = config.micro_batch_size * config.seq_length * VOCABULARY / config.tensor_model_parallel_size
    return sum(found.kept.values()) + 4 * logits


@pytest.fixture
def ranks(drive: Drive) -> startup.Ranks:
    """This process as a world of one; ``drive`` takes the process groups down."""
    return startup.prepare_environment()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_plan_is_what_a_model_holds(name: str, ranks: startup.Ranks) -> None:
    changes = VARIANTS[name]
    held, config = measure(changes, ranks), small(**changes)
    weights = stage_weights(config, VOCABULARY, 0)
    assert weights.dense + weights.expert == held.weights
    assert expected_saved(config) == pytest.approx(held.saved, rel=0.01)


SHAPES_THAT_CACHE: dict[str, dict[str, Any]] = {
    "dense": {"swiglu": True, "ffn_hidden_size": 384},
    "experts": {
        **VARIANTS["dense and shared experts"],
        **VARIANTS["latent attention"],
        "moe_ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 256,
        "ffn_hidden_size": 256,
    },
    "unfused attention": {"swiglu": True, "ffn_hidden_size": 128, "attention_backend": "local"},
}


@pytest.mark.parametrize("override", ["activations.attention_output=e5m6", "activations.swiglu_input=e4m3"])
@pytest.mark.parametrize("shape", SHAPES_THAT_CACHE)
def test_a_format_of_saved_activations_frees_what_the_plan_says(
    shape: str, override: str, ranks: startup.Ranks, drive: Drive
) -> None:
    plain, held = small(**SHAPES_THAT_CACHE[shape]), []
    cached = replace(plain, recipe_override=[override])
    for changes in ({}, {"recipe_override": override}):
        held.append(measure({**SHAPES_THAT_CACHE[shape], **changes}, ranks).saved)
        take_down()
    assert expected_saved(cached) == pytest.approx(held[1], rel=0.01)
    saving = held[0] - held[1]
    assert expected_saved(plain) - expected_saved(cached) == pytest.approx(saving, rel=0.05)
    assert saving > 0.01 * held[0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "sequence, FP8 codes": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recipe": "fp8_delayed",
        "fp8_sequence_parallel_gather": True,
    },
    "pipeline": {"pipeline_model_parallel_size": 2},
    "experts": {
        "expert_model_parallel_size": 2,
        "num_experts": 4,
        "squared_relu": True,
        "disable_bias_linear": True,
        "moe_ffn_hidden_size": 192,
        "global_batch_size": 16,
    },
}
LAYOUTS["experts, FP8 dispatch"] = LAYOUTS["experts"] | {"recipe": "mxfp8", "moe_fp8_dispatch": True}


@pytest.fixture(scope="module")
def held_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each of two processes holds under every layout, measured in one launch."""

    def run(folder: Path) -> None:
        fork_ranks(2, ["-m", "tests.training.memory.memory_worker", str(folder), json.dumps(LAYOUTS)])

    return once(tmp_path_factory, "held_by_two", run)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_is_what_two_processes_hold(name: str, held_by_two: Path) -> None:
    held = [json.loads((held_by_two / f"{name}-{rank}.json").read_text()) for rank in range(2)]
    config = small(gpus=2, **LAYOUTS[name])
    for rank in range(2):
        weights = stage_weights(config, VOCABULARY, rank if name == "pipeline" else 0)
        assert weights.dense + weights.expert == held[rank]["weights"]
    if name != "pipeline":
        # The router sends each rank more or less than its share of the tokens; together they have it all.
        saved = sum(rank["saved"] for rank in held) / 2
        assert expected_saved(config, gpus=2) == pytest.approx(saved, rel=0.01)
