"""Runs of the driver that save activations in a format: losses, resume, recomputation, layouts and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import check_activations, check_sizes
from megatron_lowprec.recipe.explain import describe_training_state
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe
from megatron_lowprec.training.models.sizes import linear_sites, tensor_ranks
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, many_runs

DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "swiglu": True,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "hidden_dropout": 0,
    "attention_dropout": 0,
}
# deepseek_tiny's kinds of layers: latent attention, a dense layer, experts beside a shared one
DEEPSEEK: dict[str, Any] = {
    **DENSE,
    "multi_latent_attention": True,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "num_experts": 4,
    "moe_layer_freq": "([0]*1+[1]*1)",
    "moe_ffn_hidden_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "normalization": "RMSNorm",
}
BOTH = ["activations.attention_output=e5m6", "activations.swiglu_input=e4m3"]


def words(folder: str, overrides: list[str], **changes: Any) -> list[str]:
    more = [word for each in overrides for word in ("--recipe-override", each)]
    return argv(save=folder, train_iters=3, save_interval=2, lr_decay_iters=10, **changes) + more


@pytest.mark.slow
@pytest.mark.parametrize("shape", [DENSE, {**DEEPSEEK, "moe_grouped_gemm": True}], ids=["dense", "deepseek"])
def test_a_run_follows_the_run_in_the_compute_dtype_and_resumes(
    shape: dict[str, Any], drive: Drive, tmp_path: Path
) -> None:
    recipe = {"recipe": "fp8_blockwise" if "num_experts" not in shape else "bf16", **shape}
    drive(words("plain", [], **recipe))
    drive(words("cached", BOTH, **recipe))
    drive(words("half", BOTH, **{**recipe, "exit_interval": 2}))
    drive(words("half", BOTH, **{**recipe, "load": "half"}))
    plain, cached, half = (losses(tmp_path / name) for name in ("plain", "cached", "half"))
    assert cached[0] == plain[0]  # the forward pass has the same bits
    assert cached != plain
    for here, there in zip(cached, plain, strict=True):
        assert float.fromhex(here) == pytest.approx(float.fromhex(there), abs=0.02)
    assert half == cached


@pytest.mark.slow
def test_recomputed_attention_has_the_same_bits(drive: Drive, tmp_path: Path) -> None:
    for name, changes in (("saved", {}), ("recomputed", {"recompute_granularity": "selective"})):
        drive(words(name, BOTH, **DENSE, **changes))
    assert losses(tmp_path / "saved") == losses(tmp_path / "recomputed")


@pytest.mark.slow
def test_two_processes_compute_what_one_does(drive: Drive, tmp_path: Path) -> None:
    split = {"tensor_model_parallel_size": 2}
    layouts = {
        "tensor": {**DENSE, **split},
        "sequence": {**DENSE, **split, "sequence_parallel": True},
        "experts": {**DEEPSEEK, **split, "sequence_parallel": True},
    }
    fixed = {"use_cpu_initialization": True}
    cases = [words(name, BOTH, **layout, **fixed) for name, layout in layouts.items()]
    stages = {**DENSE, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    cases += [words("pipeline", BOTH, **stages), words("pipeline, plain", [], **stages)]
    many_runs(2, cases, tmp_path)
    for name, shape in (("one", DENSE), ("one of experts", DEEPSEEK)):
        drive(words(name, BOTH, **shape, **fixed))
    for name in layouts:
        one = losses(tmp_path / ("one of experts" if name == "experts" else "one"))
        for here, there in zip(losses(tmp_path / name), one, strict=True):
            assert float.fromhex(here) == pytest.approx(float.fromhex(there), abs=1e-4), name  # in fp32
    # a pipeline draws other initial weights than one process
    cached, plain = (losses(tmp_path / name) for name in ("pipeline", "pipeline, plain"))
    assert cached[0] == plain[0]
    assert cached != plain
    for here, there in zip(cached, plain, strict=True):
        assert float.fromhex(here) == pytest.approx(float.fromhex(there), abs=0.02)


REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "TransformerEngine": ({"transformer_impl": "transformer_engine"}, BOTH, "only this project's layers"),
    "Megatron-core's layers": ({"no_lowprec_linears": True}, BOTH, "Megatron-core's linear layers save"),
    "full recompute": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        BOTH[1:],
        "set --recipe-override activations.swiglu_input=none",
    ),
    "gelu": ({"swiglu": None}, BOTH[1:], "add --swiglu, or set activations.swiglu_input=none"),
    "width": ({"ffn_hidden_size": 192}, BOTH[1:], "192 input features of layers.1.mlp.linear_fc2"),
    "width on a rank": (
        {"hidden_size": 128, "tensor_model_parallel_size": 2},
        BOTH[:1],
        "64 input features of layers.1.self_attention.linear_proj on each of 2 ranks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_exclude_formats_are_refused(name: str) -> None:
    changes, overrides, says = REFUSED[name]
    config = resolve_model(parse(argv(**{**DENSE, **changes}))[0])
    recipe = load_recipe("bf16", overrides)

    def start() -> None:
        check_activations(recipe, linear_sites(config), config.tensor_model_parallel_size)
        resolve_recipe(config, recipe, frozenset())

    with pytest.raises(UserError, match=says):
        start()


def test_experts_that_are_spread_over_ranks_are_whole() -> None:
    """Tensor-parallel ranks shard experts only if one expert-parallel rank has them all."""
    changes = {**DENSE, "num_experts": 4, "moe_ffn_hidden_size": 128, "tensor_model_parallel_size": 2}
    config = resolve_model(parse(argv(**changes, expert_model_parallel_size=2, sequence_parallel=True))[0])
    recipe = load_recipe("fp8_blockwise", BOTH)
    check_sizes(recipe, linear_sites(config), 2, tensor_ranks(config))
    check_activations(recipe, linear_sites(config), tensor_ranks(config))
    config = replace(config, expert_model_parallel_size=1)
    with pytest.raises(UserError, match=r"64 output features on each of 2 ranks"):
        check_sizes(recipe, linear_sites(config), 2, tensor_ranks(config))
    with pytest.raises(UserError, match=r"64 input features of .*linear_fc2 on each of 2 ranks"):
        check_activations(recipe, linear_sites(config), tensor_ranks(config))


def test_formats_are_explained_and_belong_to_the_gemms() -> None:
    recipe = load_recipe("fp8_blockwise", BOTH)
    assert describe_training_state(recipe) == [
        "activations: attention output saved in E5M6, blocks of 1x128 with power-of-two scales",
        "activations: swiglu input saved in E4M3, blocks of 1x128 with power-of-two scales",
    ]
    assert not recipe.changes_training  # Megatron-core's optimizer and gradients
    assert load_recipe("bf16+fp8_lm_o1", BOTH).activations == recipe.activations
