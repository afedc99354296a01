"""Every shipped configuration loads and validates, says where its values come from, and is what its source says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.recipe.coverage import check_sizes
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.registry import recipes
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.data.tokenizer import padded_vocab_size, tokenizer_of
from megatron_lowprec.training.memory.plan import GIB
from megatron_lowprec.training.memory.plan import plan as plan_memory
from megatron_lowprec.training.models.sizes import linear_sites, num_parameters
from megatron_lowprec.training.schedule import plan

CONFIGS = sorted((SHIPPED / "configs" / "models").glob("*.yaml"))

# What every configuration states, rather than leaving it to a default.
STATED = (
    "ffn-hidden-size",
    "norm-epsilon",
    "untie-embeddings-and-output-weights",
    "hidden-dropout",
    "attention-dropout",
    "init-method-std",
    "weight-decay",
    "clip-grad",
    "adam-beta1",
    "adam-beta2",
    "adam-eps",
    "make-vocab-size-divisible-by",
)
# Their values have a source, or are said to be ours or Megatron's, line by line or in the opening comment.
_OF_PAPERS = ("gpt_345m", "gpt_1.3b", "gpt_6.7b", "gpt_8b", "gpt_843m", "gpt_2b")
PUBLISHED = [path for path in CONFIGS if path.stem.startswith(_OF_PAPERS)]


def resolved(name: str, *flags: str, world_size: int = 8) -> Config:
    config, _, _ = parse(["--config", str(SHIPPED / f"configs/models/{name}.yaml"), *flags])
    return resolve_run(resolve_model(config), world_size=world_size, gpus=True)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("length", [[], ["--train-iters", "1"]], ids=["whole", "one"])
def test_loads_and_validates(path: Path, length: list[str]) -> None:
    config = resolved(path.stem, *length)
    schedule, _ = plan(config, config.steps.global_batch_size, config.steps.samples)
    assert 0 <= schedule.warmup_samples < schedule.decay_samples


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_sizes_suit_every_recipe(path: Path) -> None:
    config = resolve_model(parse(["--config", str(path)])[0])
    for name in recipes():
        # a projection of 576 features; the other transform of Quartet II divides it
        name = "configs/recipes/quartet2_h32.yaml" if (path.stem, name) == ("deepseek_16b", "quartet2") else name
        sites = linear_sites(config)
        check_sizes(
            load_recipe(name, config.recipe_override),
            sites,
            config.shape.num_layers,
            config.tensor_model_parallel_size,
        )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_states_what_a_reader_would_have_to_guess(path: Path) -> None:
    lines = {line.split(":")[0]: line for line in path.read_text().splitlines() if line and line[0].islower()}
    assert set(STATED) <= set(lines)
    silent = [name for name in ("norm-epsilon", "init-method-std", "adam-eps") if "#" not in lines[name]]
    assert not silent, "the source of these values, or whose default they are"
    if path in PUBLISHED:
        sourced = (*STATED[:6], "adam-beta1", "adam-beta2", "tensor-model-parallel-size")
        assert [name for name in sourced if "#" not in lines[name]] == []
    assert "\\" not in path.read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_fits_a_node_of_eight_80_gib_gpus(path: Path) -> None:
    config = resolved(path.stem)
    vocabulary = padded_vocab_size(
        tokenizer_of(config).vocab_size, config.make_vocab_size_divisible_by, config.tensor_model_parallel_size
    )
    assert plan_memory(config, load_recipe(config.recipe), vocabulary, 8).peak / GIB < 70


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt_25m", 51.5),
        ("gpt_125m", 124.5),
        ("gpt_345m", 355.9),
        ("gpt_1.3b", 1315.8),
        ("gpt_6.7b", 6666.0),
        ("gpt_345m_released", 354.9),
        ("gpt_1.3b_released", 1315.8),
        ("gpt_6.7b_released", 6657.6),
        ("gpt_843m_mxfp8", 834.2),
        ("gpt_2b_mxfp8", 1988.0),
        ("gpt_8b_mxfp8", 6049.2),
        ("llama3_8b", 7391.7),
        ("moe_16b_mxfp8", 15817.1),
        ("deepseek_16b", 15493.1),
    ],
)
def test_parameters_are_what_the_name_says(name: str, millions: float) -> None:
    config = resolve_model(parse(["--config", str(SHIPPED / f"configs/models/{name}.yaml")])[0])
    assert num_parameters(config, 50304) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "matrices", "layers", "vocabulary", "embedding"),
    # Of DeepSeek-V2-Lite, 15.7B parameters and 2.4B active ones, which leave the embedding out.
    [("moe_16b_mxfp8", 2, 24, 50304, 0), ("deepseek_16b", 3, 26, 102400, 102400 * 2048)],
)
def test_active_parameters_of_the_experts(
    name: str, matrices: int, layers: int, vocabulary: int, embedding: int
) -> None:
    config = resolved(name)
    expert = matrices * config.shape.hidden_size * config.experts.moe_ffn_hidden_size
    idle = layers * (config.experts.num_experts - config.moe_router_topk) * expert
    total = num_parameters(config, vocabulary)
    assert (total - idle - embedding) / 1e9 == pytest.approx(2.4, abs=0.06)
    assert name != "deepseek_16b" or total / 1e9 == pytest.approx(15.7, abs=0.05)


# arXiv 2502.20586, appendix; and the scripts published with it.
ADAM: dict[str, Any] = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "clip_grad": 1.0, "bf16": True}
GPT2: dict[str, Any] = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method_std": 0.02,
    "lr_decay_style": "cosine",
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
}
PAPER = ("hidden_size", "num_attention_heads", "num_layers", "seq_length", "global_batch_size", "lr", "min_lr")
SOURCES: dict[str, dict[str, Any]] = {
    "gpt_345m": dict(zip(PAPER, (1024, 16, 24, 2048, 1024, 3.0e-4, 3.0e-5))) | {"weight_decay": 0.1},
    "gpt_1.3b": dict(zip(PAPER, (2048, 32, 24, 2048, 1024, 2.0e-4, 2.0e-5))) | {"weight_decay": 0.1},
    "gpt_6.7b": dict(zip(PAPER, (4096, 32, 32, 4096, 2048, 1.6e-4, 1.6e-5))) | {"weight_decay": 0.1},
    "gpt_345m_released": dict(zip(PAPER, (1024, 16, 24, 1024, 64, 1.5e-4, 1.0e-5)))
    | {"weight_decay": 0.01, "train_iters": 500_000, "lr_decay_iters": 320_000, "micro_batch_size": 8},
    "gpt_1.3b_released": dict(zip(PAPER, (2048, 16, 24, 2048, 1024, 2.0e-4, 2.0e-5)))
    | {"weight_decay": 0.1, "train_iters": 20_000, "lr_decay_iters": 20_000, "micro_batch_size": 4},
    "gpt_6.7b_released": dict(zip(PAPER, (4096, 32, 32, 2048, 256, 1.2e-4, 1.2e-5)))
    | {"weight_decay": 0.1, "train_iters": 40_000, "tensor_model_parallel_size": 8, "micro_batch_size": 4},
}


@pytest.mark.parametrize("name", SOURCES)
def test_values_are_the_source_s(name: str) -> None:
    config = resolved(name)
    expected = SOURCES[name] | ADAM | GPT2 | {"ffn_hidden_size": 4 * SOURCES[name]["hidden_size"]}
    assert {field: getattr(config, field) for field in expected} == expected
    if name.endswith("_released"):
        assert (config.split, config.lr_warmup_fraction) == ("949,50,1", 0.01)
    else:
        assert config.lr_warmup_samples * config.shape.seq_length == pytest.approx(3.75e8, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "flags", "billions"),
    [
        ("gpt_345m", [], 20.0),
        ("gpt_1.3b", [], 20.0),
        ("gpt_1.3b", ["--train-iters", "100136"], 210.0),
        ("gpt_6.7b", [], 20.0),
        ("gpt_345m_released", [], 32.8),
        ("gpt_1.3b_released", [], 41.9),
        ("gpt_6.7b_released", [], 21.0),
        ("gpt_843m_mxfp8", [], 300.0),
        ("gpt_2b_mxfp8", [], 40.0),
        ("gpt_8b_mxfp8", [], 15_000.0),
        ("moe_16b_mxfp8", [], 1_000.0),
        ("deepseek_16b", [], 5_700.0),
    ],
)
def test_budgets_in_tokens(name: str, flags: list[str], billions: float) -> None:
    config = resolved(name, *flags)
    assert config.steps.samples * config.shape.seq_length / 1e9 == pytest.approx(billions, rel=2e-3)


def test_the_8b_model_is_the_source_s() -> None:
    config = resolved("gpt_8b_mxfp8")
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "seq_length")
    assert [getattr(config, name) for name in names] == [32, 4096, 32, 8, 128, 8192]
    assert (config.global_batch_size, config.lr, config.min_lr) == (768, 6e-4, 6e-6)
    assert (config.squared_relu, config.lr_decay_style, config.recipe) == (True, "cosine", "mxfp8")


def test_the_benchmarks_fit_their_models() -> None:
    # tools/bench step: one GPU, micro batch 16 and 8.
    for name, batch in (("gpt_345m", 16), ("gpt_1.3b", 8)):
        flags = ["--micro-batch-size", str(batch), "--global-batch-size", str(batch), "--mock-data"]
        assert resolved(name, *flags, world_size=1).micro_batch_size == batch
