"""What large models save by default: planned peaks over bf16's, and when the two options are on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.graph_options import resolve_cuda_graphs
from megatron_lowprec.training.config.memory_options import memory_notes
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe, resolve_run
from megatron_lowprec.training.memory.plan import GIB, plan

# config: GPUs, tensor-parallel size, microbatch, padded vocabulary
LAYOUTS = {
    "gpt_1.3b": (1, 1, 8, 50304),
    "gpt_6.7b": (2, 2, 1, 50432),
    "gpt_8b_mxfp8": (4, 2, 1, 50432),
    "llama3_8b": (4, 1, 1, 128256),
}
NATIVE = ("fp8_delayed", "fp8_current", "fp8_blockwise", "fp8_rowwise")
EMULATED = ("mxfp8", "mxfp4_rht_sr")


def resolved(name: str, recipe: str, microbatches: int = 1, *flags: str) -> tuple[Config, list[str]]:
    gpus, tensor, batch, _ = LAYOUTS[name]
    words = ["--micro-batch-size", str(batch), "--tensor-model-parallel-size", str(tensor), "--mock-data", *flags]
    return as_given(name, recipe, gpus, *words, "--global-batch-size", str(batch * microbatches * gpus // tensor))


def as_given(name: str, recipe: str, gpus: int, *flags: str) -> tuple[Config, list[str]]:
    """A shipped config as a run on GPUs resolves it, and its notes."""
    asked, given, _ = parse(["--config", str(SHIPPED / f"configs/models/{name}.yaml"), "--recipe", recipe, *flags])
    config, _ = resolve_recipe(resolve_model(asked), load_recipe(recipe), given)
    notes = memory_notes(config, load_recipe(recipe), given)
    config = resolve_run(replace(config, train_data_path=None, valid_data_path=None), gpus, gpus=True)
    return resolve_cuda_graphs(config, load_recipe(recipe), gpus, gpus=True)[0], notes


def peak(name: str, recipe: str, microbatches: int) -> float:
    gpus, *_, vocabulary = LAYOUTS[name]
    return plan(resolved(name, recipe, microbatches)[0], load_recipe(recipe), vocabulary, gpus).peak


@pytest.mark.parametrize("microbatches", [1, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_large_models_need_no_more_than_in_bf16(name: str, microbatches: int) -> None:
    """At most 0.97 under native FP8 recipes, 1.0 under emulated MX."""
    bf16 = peak(name, "bf16", microbatches)
    found = {recipe: peak(name, recipe, microbatches) / bf16 for recipe in (*NATIVE, *EMULATED)}
    assert {recipe: share for recipe, share in found.items() if share > (0.97 if recipe in NATIVE else 1.0)} == {}


def test_the_comments_of_a_config_are_its_plans() -> None:
    text = (SHIPPED / "configs/models/llama3_8b.yaml").read_text(encoding="utf-8")
    layouts = re.findall(r"^#   (\d) H\d00s(?: as below|, data parallel: (.*)): (\d+)$", text, re.M)
    recipe = load_recipe("fp8_current")
    for gpus, flags, gib in layouts:
        config, _ = as_given("llama3_8b", recipe.name, int(gpus), *flags.split())
        assert round(plan(config, recipe, LAYOUTS["llama3_8b"][-1], int(gpus)).peak / GIB) == int(gib)
    assert len(layouts) == 3


@pytest.mark.parametrize(
    ("name", "recipe", "flags", "fp8_param_gather", "save_memory"),
    [
        ("gpt_1.3b", "fp8_current", [], True, True),
        ("gpt_1.3b", "bf16", [], False, False),
        ("gpt_1.3b", "mxfp8", [], False, True),
        ("gpt_1.3b", "fp8_lm_o2", [], False, True),  # else it would be fp8_lm_o3
        ("gpt_1.3b", "fp8_current", ["--no-fp8-param-gather", "--no-save-memory"], False, False),
        ("gpt_1.3b", "fp8_current", ["--no-use-distributed-optimizer", "--no-overlap-param-gather"], False, True),
        ("gpt_1.3b", "fp8_current", ["--rerun-in-bf16", "layers.1.*"], False, True),
        ("gpt_1.3b", "fp8_current", ["--log-quantization-interval", "9"], False, True),
        ("gpt_1.3b", "fp8_current", ["--num-layers", "18"], False, False),  # 0.9B
        ("gpt_1.3b", "fp8_current", ["--num-layers", "18", "--fp8-param-gather", "--save-memory"], True, True),
    ],
)
def test_they_are_on_from_a_billion_parameters_on(
    name: str, recipe: str, flags: list[str], fp8_param_gather: bool, save_memory: bool
) -> None:
    config, notes = resolved(name, recipe, 1, *flags)
    assert (config.fp8_param_gather, config.save_memory) == (fp8_param_gather, save_memory)
    given: Any = {word.removeprefix("--").removeprefix("no-") for word in flags}
    for option, on in {"fp8-param-gather": fp8_param_gather, "save-memory": save_memory}.items():
        assert any(note.startswith(f"--{option} is on") for note in notes) == (on and option not in given), notes
    off = [note for note in notes if note.startswith("--fp8-param-gather is off")]
    assert len(off) == (save_memory and recipe in ("fp8_current", "fp8_lm_o2") and not fp8_param_gather), notes
