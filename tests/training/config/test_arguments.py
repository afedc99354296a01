"""Defaults <- YAML <- command line, and every way in which that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.arguments import build_parser, parse
from megatron_lowprec.training.config.options import Config
from tests.refusal import refused


def write(folder: Path, text: str) -> str:
    path = folder / "model.yaml"
    path.write_text(text)
    return str(path)


def test_command_line_wins_over_yaml_wins_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "num-layers: 3\nhidden_size: 96\nlr: 3.0e-4\nbf16: true\n")
    config, given, _ = parse(["--config", file, "--hidden-size", "64"])
    assert (config.num_layers, config.hidden_size, config.lr, config.bf16) == (3, 64, 3e-4, True)
    assert config.clip_grad == Config().clip_grad
    assert {"num_layers", "hidden_size", "lr", "bf16"} <= given
    assert "clip_grad" not in given


def test_yaml_switch_can_be_taken_back(tmp_path: Path) -> None:
    config, _, _ = parse(["--config", write(tmp_path, "bf16: true\n"), "--no-bf16"])
    assert not config.bf16


def test_a_split_without_data_to_cut_says_so(tmp_path: Path) -> None:
    file = write(tmp_path, "split: 99,1,0\ntrain-data-path: a.jsonl\n")  # the file's is for another --data-path
    assert parse(["--config", file])[2] == parse(["--config", file, "--split", "9,1", "--data-path", "b"])[2] == []
    (note,) = parse(["--config", file, "--split", "9,1"])[2]
    assert note == "--split 9,1 has no effect: it cuts the documents of --data-path"


def test_nothing_given_means_gpt_tiny() -> None:
    config, _, notes = parse(["--recipe", "mxfp4_rht_sr"])
    assert config.config is not None
    assert config.config.endswith("gpt_tiny.yaml")
    assert len(notes) == 1
    assert "gpt_tiny.yaml" in notes[0]


def test_recipe_overrides_add_up(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe-set: [keep_bf16.first_layers=1]\n")
    config, _, _ = parse(["--config", file, "--recipe-override", "a=1", "--recipe-override", "b=2"])
    assert config.recipe_override == ["keep_bf16.first_layers=1", "a=1", "b=2"]


def test_old_names_are_read_with_a_warning(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe-set: [a=1]\nfill-amax-histories: true\nsame-noise-on-data-parallel: true\n")
    config, given, notes = parse(["--config", file, "--recipe-override", "b=2"])
    assert config.recipe_override == ["a=1", "b=2"]
    assert (config.calibrate_amax, config.share_rng_across_dp) == (True, True)
    assert {"recipe_override", "calibrate_amax", "share_rng_across_dp"} <= given
    assert len(notes) == 3
    assert "--fill-amax-histories is now --calibrate-amax" in " ".join(notes)


def test_an_option_under_both_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--recipe-set and --recipe-override"):
        parse(["--config", write(tmp_path, "recipe-set: [a=1]\nrecipe-override: [b=2]\n")])


@pytest.mark.parametrize("warmup", ["--lr-warmup-iters 7", "--lr-warmup-samples 7"])
def test_a_rival_on_the_command_line_replaces_the_file_s(tmp_path: Path, warmup: str) -> None:
    config, given, _ = parse(["--config", write(tmp_path, "lr-warmup-fraction: 0.1\n"), *warmup.split()])
    assert config.lr_warmup_fraction is None
    assert "lr_warmup_fraction" not in given


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-layer: 3", ["unknown key 'num-layer'", "num-layers"]),
        ("lr: 3e-4", ["lr", "text", "write 3.0e-4"]),
        ("lr: 1e3", ["text", "write 1.0e+3"]),
        ("num-layers: '3'", ["whole number", "write 3"]),
        ("num-layers: 3.5", ["whole number", "3.5"]),
        ("num-layers: true", ["whole number", "True"]),
        ("bf16: 1", ["true or false", "1"]),
        ("normalization: BatchNorm", ["BatchNorm", "LayerNorm"]),
        ("lr: [1, 2]", ["a number", "[1, 2]"]),
        ("rampup-batch-size: [1, x]", ["whole number", "'x'"]),
        ("- num-layers", ["keys and values", "list"]),
        ("lr: !!python/object/apply:os.system [ls]", ["is no valid YAML: line 1, column"]),
        ("a: [", ["is no valid YAML: line 1, column"]),
        ("train-iters: 3\ntrain-samples: 4", ["--train-iters", "--train-samples", "exclude"]),
        ("lr: 1.0\nlr: 2.0", ["line 2, column 1", "'lr' is there twice"]),
    ],
)
def test_yaml_errors_are_one_line_that_names_the_fix(tmp_path: Path, text: str, words: list[str]) -> None:
    with refused(*words):
        parse(["--config", write(tmp_path, text)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--config nowhere.yaml", ["nowhere.yaml", "no such file", "configs/models/"]),
        ("--config gpt_345", ["gpt_345", "did you mean configs/models/gpt_345m.yaml?"]),
        ("--config configs/recipes/mxfp8_bf16_ends.yaml", ["is a recipe", "--recipe"]),
        ("--num-layers 2 mxfp8", ["'mxfp8' is no flag"]),
        ("--spec megatron_lowprec.specs mxfp8", ["--spec", "Megatron-LM", "--recipe NAME"]),
        ("--num-layer 3", ["unknown flag --num-layer", "--num-layers"]),
        ("--num-layers three", ["--num-layers", "three"]),
        ("--normalization BatchNorm", ["BatchNorm", "LayerNorm"]),
        ("--num-layers 2 --train-iters 3 --train-samples 4", ["exclude"]),
        ("--num-layers 2 --fp8-format hybrid", ["--fp8-format hybrid", "fp8_delayed"]),
        ("--num-layers 2 --fp8-recipe delayed", ["--recipe fp8_delayed"]),
        ("--num-layers 2 --fp8-recipe mxfp8", ["--recipe mxfp8"]),
        ("--num-layers 2 --fp8-amax-history-len 512", ["fprop.input.history"]),
        ("--num-layers 2 --fp8-amax-compute-algo max", ["history_rule"]),
        ("--num-layers 2 --fp8-margin 1", ["margin"]),
        ("--num-layers 2 --num-layers-at-end-in-bf16 2", ["--first-last-layers-bf16"]),
    ],
)
def test_flag_errors_are_one_line_that_names_the_fix(arguments: str, words: list[str]) -> None:
    with refused(*words):
        parse(arguments.split())


def test_megatron_s_bf16_layers_become_the_recipe_s() -> None:
    config, _, _ = parse(["--num-layers", "8", "--first-last-layers-bf16", "--num-layers-at-end-in-bf16", "3"])
    assert config.recipe_override == ["keep_bf16.first_layers=1", "keep_bf16.last_layers=3"]


def test_help_lists_every_public_option() -> None:
    text = " ".join(build_parser().format_help().split())
    assert "iterations between validations; at least 1 (default: 1000)" in text
    assert "--tensor-model-parallel-size" in text
    assert "--recipe-override" in text
    assert "--no-lowprec-linears" not in text


@pytest.mark.parametrize("flag", ["--recipe", "--load", "--data-path", "--config"])
def test_an_empty_value_is_refused(flag: str) -> None:
    """It is an unset variable of a script; a path would be the current folder."""
    with pytest.raises(UserError, match=f"the command line has {flag} with an empty value"):
        parse([flag, ""])
