"""What large models save by default: planned peaks over bf16's, and when the three options are on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_lowprec import UserError
from megatron_lowprec.kernels.fp8_accumulate import cublaslt
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.config.accumulation_options import resolve_accumulation
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.memory.plan import GIB, plan
from tests.training.conftest import Drive
from tests.training.helpers import argv
from tools.tables.of_plans import EMULATED, LAYOUTS, NATIVE, as_given, peak, resolved


@pytest.mark.parametrize("microbatches", [1, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_large_models_need_no_more_than_in_bf16(name: str, microbatches: int) -> None:
    """At most 0.97 under native FP8 recipes, 1.0 under emulated MX."""
    layout = LAYOUTS[name]
    bf16 = peak(layout, "bf16", microbatches)
    found = {recipe: peak(layout, recipe, microbatches) / bf16 for recipe in (*NATIVE, *EMULATED)}
    assert {recipe: share for recipe, share in found.items() if share > (0.97 if recipe in NATIVE else 1.0)} == {}


def test_the_comments_of_a_config_are_its_plans() -> None:
    text = (SHIPPED / "configs/models/llama3_8b.yaml").read_text(encoding="utf-8")
    layouts = re.findall(r"^#   (\d) H\d00s(?: as below|, data parallel: (.*)): (\d+)$", text, re.M)
    recipe = load_recipe("fp8_current")
    for gpus, flags, gib in layouts:
        config, _ = as_given("llama3_8b", recipe.name, int(gpus), *flags.split())
        assert round(plan(config, recipe, LAYOUTS["llama3_8b"].vocabulary, int(gpus)).peak / GIB) == int(gib)
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
    config, notes = resolved(LAYOUTS[name], recipe, 1, *flags)
    assert (config.fp8_param_gather, config.save_memory) == (fp8_param_gather, save_memory)
    given: Any = {word.removeprefix("--").removeprefix("no-") for word in flags}
    for option, on in {"fp8-param-gather": fp8_param_gather, "save-memory": save_memory}.items():
        assert any(note.startswith(f"--{option} is on") for note in notes) == (on and option not in given), notes
    off = [note for note in notes if note.startswith("--fp8-param-gather is off")]
    assert len(off) == (save_memory and recipe in ("fp8_current", "fp8_lm_o2") and not fp8_param_gather), notes


ADDS = "--fp8-accumulate-wgrad"
ADDS_BY_DEFAULT = (
    "--fp8-accumulate-wgrad is on, as from 1e9 parameters on with several microbatches: --no-fp8-accumulate-wgrad adds "
    "in a second pass"
)
SMALL = ("--num-layers", "18")


def adds(
    config: Config, recipe: str, microbatches: int, arch: str | None = "sm90", stored: bool | None = None
) -> tuple[bool | None, list[str]]:
    """--fp8-accumulate-wgrad of a configuration by ``resolved``, and the lines about it."""
    samples = microbatches * config.steps.micro_batch_size
    one_rank = replace(config, global_batch_size=samples, tensor_model_parallel_size=1)
    found, notes = resolve_accumulation(one_rank, load_recipe(recipe), 1, arch, stored)
    return found.fp8_accumulate_wgrad, notes


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_current_bf16_ends", "fp8_lm", "fp8_lm_o3"])
def test_products_of_large_models_add_to_main_grad(recipe: str) -> None:
    config, _ = resolved(LAYOUTS["gpt_1.3b"], recipe)
    assert adds(config, recipe, 2) == (True, [ADDS_BY_DEFAULT])


@pytest.mark.parametrize(
    ("recipe", "flags", "microbatches", "arch"),
    [
        ("fp8_current", [], 1, "sm90"),
        ("fp8_current", [], 16, "sm89"),  # where its products have not run
        ("fp8_current", [], 16, "sm100"),
        ("fp8_current", SMALL, 16, "sm90"),
        ("bf16", [], 16, "sm90"),
        ("mxfp8", [], 16, "sm90"),  # emulated
        ("mxfp8", [], 16, "sm100"),  # native, in blocks of 32
        ("mxfp4_rht_sr", [], 16, "sm90"),
        ("nvfp4", [], 16, "sm100"),  # blocks, under a scale a tensor
        ("fp8_blockwise", [], 16, "sm90"),
        ("deepseek_v3", [], 16, "sm90"),
        ("fp8_rowwise", [], 16, "sm90"),
        ("fp8_current", ["--emulate"], 16, "sm90"),
        ("fp8_current", ["--no-bf16"], 16, "sm90"),
        ("fp8_current", [], 16, "sm80"),
        ("fp8_current", [], 16, "cpu"),
        ("fp8_current", ["--no-gradient-accumulation-fusion"], 16, "sm90"),
        ("fp8_current", ["--grad-reduce-in-bf16"], 16, "sm90"),
        ("fp8_current", ["--transformer-impl", "transformer_engine"], 16, "sm90"),
        ("fp8_current", ["--num-experts", "8", "--moe-router-topk", "2"], 16, "sm90"),
    ],
)
def test_others_add_in_a_second_pass(recipe: str, flags: list[str], microbatches: int, arch: str) -> None:
    config, _ = resolved(LAYOUTS["gpt_1.3b"], recipe, 1, *flags)
    assert adds(config, recipe, microbatches, arch) == (False, [])


def test_a_run_needs_a_torch_with_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = resolved(LAYOUTS["gpt_1.3b"], "fp8_current")
    monkeypatch.setattr("megatron_lowprec.kernels.dispatch.arch_here", lambda: "sm90")
    for library, found in ((object(), (True, [ADDS_BY_DEFAULT])), (None, (False, []))):
        monkeypatch.setattr(cublaslt, "library", lambda library=library: library)
        assert adds(config, "fp8_current", 2, None) == found


def test_products_that_add_are_refused_without_cublaslt(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    with pytest.raises(UserError, match=f"{ADDS}: FP8 products that add to main_grad need cuBLASLt"):
        drive(argv(fp8_accumulate_wgrad=True))


@pytest.mark.parametrize("flags", [(), SMALL, ("--no-gradient-accumulation-fusion",)])
@pytest.mark.parametrize("given", [True, False])
def test_a_given_flag_decides_whether_products_add(flags: tuple[str, ...], given: bool) -> None:
    words = (ADDS if given else "--no-fp8-accumulate-wgrad", *flags)
    if given and "--no-gradient-accumulation-fusion" in flags:
        with pytest.raises(UserError, match=f"{ADDS} excludes --no-gradient-accumulation-fusion; leave one"):
            resolved(LAYOUTS["gpt_1.3b"], "fp8_current", 1, *words)
        return
    config, _ = resolved(LAYOUTS["gpt_1.3b"], "fp8_current", 1, *words)
    for stored in (None, True, False):
        for microbatches in (1, 16):
            assert adds(config, "fp8_current", microbatches, "cpu", stored) == (given, [])


@pytest.mark.parametrize(
    ("stored", "flags", "microbatches", "arch", "on", "note"),
    [
        (True, (), 16, "sm90", True, ADDS_BY_DEFAULT),
        (False, (), 16, "sm90", False, f"{ADDS}: off, as in the checkpoint's run"),
        (True, (), 1, "sm90", True, f"{ADDS}: on, as in the checkpoint's run"),  # it may have several again
        (True, SMALL, 16, "sm90", True, f"{ADDS}: on, as in the checkpoint's run"),
        (False, SMALL, 16, "sm90", False, None),
        (True, (), 16, "cpu", False, None),  # another note names changed options
    ],
)
def test_a_resumed_run_adds_as_before(
    stored: bool, flags: tuple[str, ...], microbatches: int, arch: str, on: bool, note: str | None
) -> None:
    config, _ = resolved(LAYOUTS["gpt_1.3b"], "fp8_current", 1, *flags)
    assert adds(config, "fp8_current", microbatches, arch, stored) == (on, [] if note is None else [note])


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_no_rank_s_sizes_decide_whether_products_add(tensor: int) -> None:
    """Over four ranks no layer's shape is one of FP8 products."""
    sizes = ["--hidden-size", "2064", "--ffn-hidden-size", "8272", "--num-attention-heads", "12", "--num-layers", "24"]
    layout = ["--tensor-model-parallel-size", str(tensor), "--micro-batch-size", "1", "--global-batch-size", "16"]
    config, _ = as_given("gpt_1.3b", "fp8_current", 4, *sizes, *layout, "--mock-data")
    assert resolve_accumulation(config, load_recipe("fp8_current"), 4, "sm90")[1] == [ADDS_BY_DEFAULT]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--memory-plan"], True),
        (["--memory-plan", "--device", "sm100"], False),
        (["--memory-plan", "--memory-plan-gpus", "256"], False),  # one microbatch
        (["--explain-recipe", "--device", "sm90"], True),
        (["--explain-recipe", "--device", "sm90", "--global-batch-size", "1"], False),
        (["--explain-recipe", "--device", "cpu"], False),
    ],
)
def test_plans_say_once_that_products_add(
    drive: Drive, capsys: pytest.CaptureFixture[str], flags: list[str], says: bool
) -> None:
    drive(["--config", str(SHIPPED / "configs/models/llama3_8b.yaml"), "--recipe", "fp8_current", *flags])
    lines = [line for line in capsys.readouterr().out.splitlines() if ADDS in line]
    assert lines == [ADDS_BY_DEFAULT] * says
