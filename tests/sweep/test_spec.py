"""What a sweep file may say."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.report.claims import load_claims
from megatron_lowprec.report.planning.before_start import undecided
from megatron_lowprec.shipped import SHIPPED as ROOT
from megatron_lowprec.sweep.budgets import budgets
from megatron_lowprec.sweep.jobs import expand
from megatron_lowprec.sweep.spec import RecipeChoice, Resources, merge, read, seeds_of, size_names
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.data import tokenizer
from megatron_lowprec.training.distributed.startup import Ranks
from megatron_lowprec.training.run import run
from tests.refusal import refused
from tests.sweep.conftest import Fake, WriteSweep

SHIPPED = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
LARGE = frozenset({"full", "2b", "8b", "8b_gradients", "16b"})
"""Sizes of eight GPUs a job."""
READ_ONCE = cache(tokenizer._gpt2_bpe)
NAMES = {"paper_table2", "rht_block_size", "fp8_forward", "mxfp8_rounding", "fp8_scaling", "fp8_lm"}
CHECKS = {"fp8_native", "mxfp8_native"}  # of this project's own kernels, on a GPU alone
STUDIES = {"gpt_25m_schedule", "all_recipes", "token_ladder", "learning_rate", "mxfp8_operands", "late_growth"}
STUDIES |= {"fp4_rivals", "muon", "stochastic_rounding", "two_domains"}
"""Of one question each."""


def test_the_shipped_sweeps_are_listed() -> None:
    assert {path.stem for path in SHIPPED} == NAMES | CHECKS | STUDIES


def test_a_check_of_kernels_has_each_recipe_native_and_emulated_with_two_seeds() -> None:
    sweep = read("configs/sweeps/fp8_native.yaml", None)
    found = expand(sweep, {"data_path": ["a_text_document"]}, 1)
    assert len(found) == len(sweep.recipes) * 2 * 2
    assert {job.resolved["options"].get("emulate", False) for job in found} == {True, False}


@pytest.mark.parametrize("size", ["small", "2b"])
def test_blackwells_products_and_their_emulation_are_labels(size: str) -> None:
    """Of one recipe, in one group of a report, so that a claim compares them."""
    found = expand(read("configs/sweeps/mxfp8_native.yaml", size), {"data_path": ["a_text_document"]}, 1)
    native = {job.label: job.resolved["options"].get("native", "auto") for job in found}
    assert native.pop("bf16") == "auto"
    assert {label.removesuffix("_native") for label in native} == {job.resolved["recipe"]["name"] for job in found} - {
        "bf16"
    }
    assert native == {label: "require" if label.endswith("_native") else "off" for label in native}
    assert len(found) == 2 * (1 + len(native))


@pytest.mark.parametrize("size", ["tiny", "small", "full"])
@pytest.mark.parametrize("path", [path for path in SHIPPED if path.stem in NAMES], ids=lambda path: path.stem)
def test_every_shipped_sweep_expands_at_every_size(path: Any, size: str) -> None:
    sweep = read(str(path), size)
    assert sweep.summary
    need = {"tiny": None, "small": "train_data_path", "full": "data_path"}[size]
    settings = {need: ["a_text_document"]} if need else {}
    found = expand(sweep, settings, sweep.resources.gpus_per_job or sweep.resources.processes_per_job)
    labels = [choice.label for choice in sweep.recipes]
    assert "bf16" in labels
    assert len(found) == len(labels) * len(sweep.models) * len(sweep.seeds)
    # the same run under two names would be a waste
    assert len({str(job.resolved) + str(job.seed) for job in found}) == len(found)
    if size == "small":
        assert len(sweep.seeds) == 2
        options = [job.resolved["options"] for job in found]
        assert {(o["seq_length"], o["global_batch_size"], o["lr"], o["min_lr"]) for o in options} == {
            (1024, 32, 1e-3, 1e-4)
        }
        assert {(o["lr_decay_style"], o["lr_warmup_fraction"]) for o in options} == {("cosine", 0.1)}
        assert {job.train_iters * 32 * 1024 for job in found} == {2200 * 32 * 1024}
    if need:
        name = need.replace("_", "-")
        words = f"needs --{name}: give {'--data-path or ' * (name == 'data-path')}--set {name}=VALUE"
        with pytest.raises(UserError, match=words):
            expand(sweep, {}, sweep.resources.gpus_per_job or 1)


@pytest.mark.parametrize(
    ("name", "size"),
    [(path.stem, size) for path in SHIPPED if path.stem not in NAMES for size in size_names(str(path))],
)
def test_every_study_pairs_its_recipes_over_two_seeds_at_least(name: str, size: str | None) -> None:
    sweep = read(f"configs/sweeps/{name}.yaml", size)
    found = expand(replace(sweep, seeds=sweep.seeds[:2]), {need: ["a_text_document"] for need in sweep.needs}, 1)
    assert "bf16" in [choice.label for choice in sweep.recipes]
    assert len(found) == len(sweep.recipes) * len(sweep.models) * len(sweep.variants) * 2
    assert len({str(job.resolved) + str(job.seed) for job in found}) == len(found)
    # a study compares by one text that no run has trained on
    assert name in CHECKS or sweep.needs == ("train_data_path",)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(path.stem, size, marks=() if str(size) in LARGE else pytest.mark.weekly, id=f"{path.stem}-{size}")
        for path in SHIPPED
        for size in size_names(str(path))
    ],
)
def test_each_job_has_a_memory_plan_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, size: str | None
) -> None:
    """``--memory-plan`` of a job, on GPUs of 80 GiB; data need not exist."""
    monkeypatch.setattr(tokenizer, "_gpt2_bpe", READ_ONCE)
    sweep = read(f"configs/sweeps/{name}.yaml", size)
    processes = sweep.resources.gpus_per_job or sweep.resources.processes_per_job
    jobs = expand(replace(sweep, seeds=sweep.seeds[:1]), {need: ["a_text_document"] for need in sweep.needs}, processes)
    for job in jobs:
        run([*job.arguments, "--memory-plan", "--memory-plan-gpus", str(processes)], Ranks(0, 1, 0, 1))
        (peak,) = re.findall(r"  peak \(.*\) +([0-9.]+) ([GM])iB", capsys.readouterr().out)
        assert peak[1] == "M" or float(peak[0]) < 72, job.id  # of 80, see memory.report


def test_large_runs_have_the_seeds_that_any_verdict_needs() -> None:
    """Their lengths are the sources', which may be short of a verdict."""
    claims = load_claims(ROOT / "configs" / "claims.yaml")
    for path in SHIPPED:
        for size in LARGE.intersection(map(str, size_names(str(path)))):
            sweep = read(str(path), size)
            lines = undecided(expand(sweep, {need: ["a_text_document"] for need in sweep.needs}, 8), claims)
            assert not [line for line in lines if "one seed" in line], (path.stem, size)


@pytest.mark.parametrize(("size", "tokens"), [("8b", 15e12), ("16b", 1e12)])
def test_the_second_blend_of_a_large_run_is_required(size: str, tokens: float) -> None:
    sweep = read("configs/sweeps/mxfp8_rounding.yaml", size)
    with pytest.raises(UserError, match="needs --data-phase-path"):
        expand(sweep, {"data_path": ["a_text_document"]}, 8)
    (job, *_) = expand(sweep, {"data_path": ["first"], "data_phase_path": ["second"]}, 8)
    config = resolve_run(resolve_model(parse(job.arguments)[0]), 8, gpus=True)
    assert config.data_phase_path == ["second"]
    assert config.data_phase_switch_samples == round(0.6 * job.train_iters) * config.global_batch_size
    assert job.train_iters * config.global_batch_size * job.seq_length == pytest.approx(tokens, rel=1e-5)


def test_all_recipes_are_all_registered_ones_for_a_model_without_swiglu() -> None:
    plain = {name for name in recipes() if get_recipe(name).activations.swiglu_input == "none"}
    assert {choice.label for choice in read("configs/sweeps/all_recipes.yaml", "small").recipes} == plain


@pytest.mark.parametrize("name", sorted(NAMES & {"rht_block_size", "mxfp8_rounding", "fp8_forward"}))
def test_variants_of_a_recipe_are_compared_at_8m_with_three_seeds(name: str) -> None:
    sweep = read(f"configs/sweeps/{name}.yaml", "8m")
    assert ([model.label for model in sweep.models], len(sweep.seeds)) == (["gpt_8m"], 3)


def test_paper_table2_has_the_recipes_of_the_table() -> None:
    assert [choice.label for choice in read("configs/sweeps/paper_table2.yaml").recipes] == [
        *("bf16", "mxfp4", "mxfp4_rht", "mxfp4_sr", "mxfp4_rht_sr")
    ]


def test_the_fp8_scaling_sweep_quantizes_something_in_every_job() -> None:
    sweep = read("configs/sweeps/fp8_scaling.yaml", "tiny")
    assert sweep.options["num_layers"] > 2


def test_sizes_replace_lists_and_add_to_mappings(write_sweep: WriteSweep) -> None:
    over = {"recipes": ["mxfp8"], "options": {"train-iters": 9, "lr": 1.0e-4}, "slurm": {"time": "01:00:00"}}
    path = write_sweep(sizes={"tiny": None, "big": over}, slurm={"partition": "gpu"})
    tiny, big = read(path), read(path, "big")
    assert (tiny.size, [choice.label for choice in tiny.recipes]) == ("tiny", ["bf16", "mxfp4"])
    assert [choice.label for choice in big.recipes] == ["mxfp8"]
    assert big.options == {**tiny.options, "train_iters": 9, "lr": 1e-4}
    assert big.slurm == {"partition": "gpu", "time": "01:00:00"}


def test_a_size_takes_rivals_and_nulls_away(write_sweep: WriteSweep) -> None:
    sizes = {"big": {"options": {"train-samples": 64, "log-interval": None}}}
    options = read(write_sweep(sizes=sizes), "big").options
    assert options["train_samples"] == 64
    assert not {"train_iters", "log_interval"} & options.keys()


def test_merge_takes_nulls_from_the_upper_part_alone() -> None:
    assert merge({"lr": 1.0, "seed": 2}, {"lr": None}) == {"seed": 2}


def test_recipes_by_name_file_and_mapping(write_sweep: WriteSweep) -> None:
    entry = {"label": "g128", "recipe": "mxfp4_rht", "recipe_set": ["dgrad.hadamard.block=128"]}
    recipes = read(write_sweep(recipes=["bf16", "configs/recipes/mxfp8_bf16_ends.yaml", entry])).recipes
    assert recipes == (
        RecipeChoice("bf16", "bf16"),
        RecipeChoice("mxfp8_bf16_ends", "configs/recipes/mxfp8_bf16_ends.yaml"),
        RecipeChoice("g128", "mxfp4_rht", ("dgrad.hadamard.block=128",)),
    )
    options = {"label": "native", "recipe": "mxfp8", "options": {"native": "require"}}
    (native,) = read(write_sweep(recipes=[options])).recipes
    assert native == RecipeChoice("native", "mxfp8", options={"native": "require"})
    with pytest.raises(UserError, match="mxfp8 with options has no label"):
        read(write_sweep(recipes=[{"recipe": "mxfp8", "options": {"native": "require"}}]))
    named = [{"recipe": "mxfp8"}, {"recipe": "configs/recipes/mxfp8_bf16_ends.yaml"}]
    assert [choice.label for choice in read(write_sweep(recipes=named)).recipes] == ["mxfp8", "mxfp8_bf16_ends"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": ["bf16"]}, "unknown key 'recipe'; the nearest one is recipes"),
        ({"options": {"train-iter": 3}}, "unknown key 'train-iter'; the nearest one is train-iters"),
        ({"options": {"lr": "1e-3"}}, "which YAML 1.1 reads as text"),
        ({"options": {"seed": 3}}, "seed is not an option of a job; it belongs to seeds:"),
        ({"options": {"recipe-override": ["a=1"]}}, "it belongs to recipes:"),
        ({"options": {"save": "x"}}, "it belongs to --out"),
        ({"options": {"fp8-format": "hybrid"}}, "it belongs to recipes:"),
        ({"options": {"train-iters": 3, "train-samples": 3}}, "exclude each other"),
        ({"models": ["gpt_tny"]}, "gpt_tny: no such model; the nearest one is gpt_tiny"),
        ({"models": []}, "write a list with at least one entry"),
        ({"recipes": "bf16"}, "recipes is 'bf16'; write a list"),
        ({"recipes": [{"label": "bf16"}]}, "recipe is None; write a name"),
        (
            {"recipes": [{"recipe": "mxfp8", "recipe_override": ["wgrad=null"]}]},
            "mxfp8 with recipe_override has no label; add one, such as label: my_mxfp8",
        ),
        ({"seeds": [1, 2, 1]}, "sweep.yaml: seeds names 1 twice; name each seed once"),
        ({"recipes": [{"label": "a/b", "recipe": "bf16"}]}, "the label 'a/b' names a folder"),
        ({"recipes": [{"label": "a", "recipe": "bf16", "set": []}]}, "unknown key 'set'"),
        ({"recipes": [{"label": "a", "recipe": "bf16", "recipe_set": "x=1"}]}, "write a list such as"),
        ({"seeds": [-1]}, "-1 is not a whole number"),
        ({"seeds": [True]}, "True is not a whole number"),
        ({"overrides": {"a b": {}}}, "the label 'a b'"),
        ({"needs": ["data-pat"]}, "unknown key 'data-pat'; the nearest one is data-path"),
        ({"resources": {"gpu_per_cell": 1}}, "unknown key 'gpu_per_cell'; the nearest one is gpus_per_job"),
        ({"resources": {"gpus_per_job": 0}}, "gpus_per_job is 0; write a whole number of at least 1"),
        ({"resources": {"gpus_per_job": 2, "jobs_per_gpu": 2}}, "set one of the two to 1"),
        ({"slurm": {"array": "0-3"}}, "array is set by the sweep"),
        ({"slurm": {"time": 43200}}, "put it into quotes"),
        ({"slurm": {"exclusive": True}}, "write text or a number"),
        ({"sizes": {"tiny": {"sizes": {}}}}, "unknown key 'sizes'"),
        ({"sizes": ["tiny"]}, "expected keys and values"),
    ],
)
def test_invalid_files_are_refused_in_one_line(write_sweep: WriteSweep, changes: dict[str, Any], message: str) -> None:
    with refused(message):
        read(write_sweep(**changes))


def test_unknown_sizes_and_files(write_sweep: WriteSweep, tmp_path: Any) -> None:
    with pytest.raises(UserError, match="has no such size; it has no sizes: leave --size out"):
        read(write_sweep(), "tiny")
    with pytest.raises(UserError, match="it has a, b"):
        read(write_sweep(sizes={"a": {}, "b": {}}), "tiny")
    with pytest.raises(UserError, match="no such file; the shipped ones are in configs/sweeps/"):
        read(str(tmp_path / "nothing.yaml"))
    with pytest.raises(UserError, match=r"no such file; did you mean configs/sweeps/paper_table2\.yaml\?"):
        read("paper_table")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(UserError, match="no valid YAML"):
        read(str(tmp_path / "broken.yaml"))


def test_yaml_makes_no_objects(tmp_path: Any) -> None:
    (tmp_path / "evil.yaml").write_text("summary: !!python/object/apply:os.getcwd []")
    with pytest.raises(UserError, match="no valid YAML"):
        read(str(tmp_path / "evil.yaml"))


def test_resources_are_read_under_their_old_names(write_sweep: WriteSweep) -> None:
    old = {"gpus_per_cell": 2, "cells_per_gpu": 1, "processes_per_cell": 3, "cells_at_once": 4}
    assert read(write_sweep(resources=old)).resources == Resources(2, 1, 3, 4)


def test_resources_default_to_those_of_the_machine() -> None:
    assert Resources() == Resources(None, 1, 1, None)


@pytest.mark.parametrize(
    ("text", "seeds"), [("7", (7,)), ("1234-1236", (1234, 1235, 1236)), ("9, 5-6", (9, 5, 6)), ("3-3", (3,))]
)
def test_seeds_on_the_command_line(text: str, seeds: tuple[int, ...]) -> None:
    assert seeds_of(text) == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no seed; write numbers or ranges, such as 1234-1241"),
        ("1,,2", "'' is no seed"),
        ("-3", "'-3' is no seed"),
        ("1-", "'1-' is no seed"),
        ("a", "'a' is no seed"),
        ("8-5", "the range 8-5 falls; write 5-8"),
        ("4,1-5", "--seeds 4,1-5 names 4 twice; name each seed once"),
    ],
)
def test_seeds_that_are_refused(text: str, message: str) -> None:
    with refused(message):
        seeds_of(text)


def test_the_command_line_s_seeds_replace_the_file_s(
    fake: Fake, write_sweep: WriteSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(recipes=["bf16"], seeds=[1, 2])
    assert fake.run(path, "--seeds", "2,5-6", "--dry-run") == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [
        *("gpt_tiny-bf16-s2", "gpt_tiny-bf16-s5", "gpt_tiny-bf16-s6")
    ]
    # tasks of an array number the same jobs
    assert fake.run(path, "--seeds", "2,5-6", "--slurm-dry-run") == 0
    assert "--seeds 2,5-6 " in capsys.readouterr().out


def test_budgets_of_a_file(write_sweep: WriteSweep) -> None:
    (only,) = budgets(write_sweep())
    labels = [label for label, _ in only.recipes]
    assert (only.size, only.model, only.tokens, only.only(labels)) == (None, "gpt_tiny", 4 * 4 * 32, [])
    assert only.only(labels[:1]) == [f"gpt_tiny-{labels[0]}-s[0-9]*"]
    variants = {"a": {}, "b": {"train-iters": 8}}
    sizes = {"small": {}, "large": {"models": ["gpt_tiny", "gpt_25m"], "overrides": variants}}
    found = budgets(write_sweep(sizes=sizes, needs=["data-path"], options={"train-iters": 4}))
    assert [(each.size, each.only(labels)) for each in found] == [
        ("small", []),
        *(("large", [f"{model}-*-{variant}-s[0-9]*"]) for model in ("gpt_tiny", "gpt_25m") for variant in "ab"),
    ]
    assert found[1].only(labels[1:]) == [f"gpt_tiny-{labels[1]}-a-s[0-9]*"]
    assert {each.parameters for each in found[3:]} == {51_500_032}  # as run.json of the archive in docs/results
    assert found[4].tokens == 2 * found[3].tokens
    assert {(len(each.recipes), each.needs) for each in found} == {(2, ("data_path",))}
