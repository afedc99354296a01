"""From a sweep to the command lines of its jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.sweep.jobs import (
    DRIVER,
    Job,
    command,
    expand,
    flags,
    read_manifest,
    selected,
    settings_of,
    write_manifest,
)
from megatron_lowprec.sweep.spec import read
from megatron_lowprec.training.config.arguments import parse
from tests.refusal import refused
from tests.sweep.conftest import REPOSITORY, WriteSweep


def jobs(path: str, *settings: str, processes: int = 1) -> list[Job]:
    return expand(read(path), settings_of(settings), processes)


def test_every_combination_once_the_first_seed_first(write_sweep: WriteSweep) -> None:
    path = write_sweep(seeds=[1, 2], overrides={"base": {}, "low": {"lr": 5.0e-4}}, models=["gpt_tiny", "gpt_25m"])
    found = jobs(path, "global-batch-size=8")
    assert [job.index for job in found] == list(range(16))
    assert [job.id for job in found[:5]] == [
        "gpt_tiny-bf16-base-s1",
        "gpt_tiny-mxfp4-base-s1",
        "gpt_tiny-bf16-low-s1",
        "gpt_tiny-mxfp4-low-s1",
        "gpt_25m-bf16-base-s1",
    ]
    assert {job.id for job in found[8:]} == {job.id.replace("-s1", "-s2") for job in found[:8]}
    low = next(job for job in found if job.id == "gpt_25m-mxfp4-low-s2")
    assert (low.label, low.model, low.variant, low.seed) == ("mxfp4", "gpt_25m", "low", 2)
    config, _, _ = parse(low.arguments)
    assert (config.recipe, config.seed, config.lr, config.global_batch_size) == ("mxfp4", 2, 5e-4, 8)


def test_the_later_wins(write_sweep: WriteSweep) -> None:
    """Model file < the sweep's options < the model's options < variant < --set."""
    options = {"lr": 1.0e-1, "min-lr": 1.0e-5, "clip-grad": 2.0, "weight-decay": 0.2, "train-iters": 4}
    model = {"model": "gpt_tiny", "options": {"min-lr": 2.0e-5, "clip-grad": 3.0, "weight-decay": 0.3}}
    path = write_sweep(
        options=options, models=[model], overrides={"a": {"clip-grad": 4.0, "weight-decay": 0.4}}, recipes=["bf16"]
    )
    (job,) = jobs(path, "weight-decay=0.5")
    config, _, _ = parse(job.arguments)
    found = (config.adam_beta2, config.lr, config.min_lr, config.clip_grad, config.weight_decay)
    assert found == (0.95, 1e-1, 2e-5, 4.0, 0.5)


def test_settings_are_written_as_on_the_command_line() -> None:
    texts = ["lr=1e-3", "--train-iters=5", "bf16=false", "data_path=0.3 a 'b c'", "wandb-exp-name=12", "min-lr=null"]
    assert settings_of(texts) == {
        "lr": 1e-3,
        "train_iters": 5,
        "bf16": False,
        "data_path": ["0.3", "a", "b c"],
        "wandb_exp_name": "12",
        "min_lr": None,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "has no value: write KEY=VALUE"),
        ("lrr=1", "unknown key 'lrr'; the nearest one is lr"),
        ("zzz=1", "unknown key 'zzz'; pretrain_gpt.py --help lists all of them"),
        ("lr=fast", "wants a number"),
        ("train-iters=1.5", "wants a whole number"),
        ("bf16=yes", "wants true or false"),
        ('data-path="a', '--set data-path: "a cannot be split into words: No closing quotation'),
        ("seed=3", "it belongs to seeds:"),
        ("optimizer=lion", "'lion' is not one of adam, muon, sgd"),
    ],
)
def test_settings_that_are_wrong(text: str, message: str) -> None:
    with refused(message):
        settings_of([text])


def test_data_on_the_command_line_replaces_the_file_s_in_any_form(write_sweep: WriteSweep) -> None:
    path = write_sweep(needs=["data-path"], recipes=["bf16"], options={"train-data-path": ["x"], "train-iters": 2})
    for setting, names in (("data-path=y", {"data_path"}), ("train-data-path=y", {"train_data_path"})):
        (job,) = jobs(path, setting)
        config, _, _ = parse(job.arguments)
        assert {n for n in ("data_path", "train_data_path") if getattr(config, n)} == names
    for settings in ([], ["data-path=null"]):
        with pytest.raises(UserError, match="needs --data-path"):
            jobs(path, *settings)


def test_errors_of_the_driver_are_raised_before_any_job_starts(write_sweep: WriteSweep) -> None:
    with pytest.raises(UserError, match=r"gpt_tiny-mxfp4-s1: .*198 output features are no multiple of 32"):
        jobs(write_sweep(), "hidden-size=66", "ffn-hidden-size=66", "num-attention-heads=1")
    with pytest.raises(UserError, match=r"gpt_tiny-bf16-s1: .*3 processes are not divisible by tensor 2"):
        jobs(write_sweep(), "tensor-model-parallel-size=2", processes=3)
    with pytest.raises(UserError, match=r"gpt_tiny-deepseek_v3-s1: .*feeds another activation: add --swiglu"):
        jobs(write_sweep(recipes=["deepseek_v3"]), "bf16=true", "hidden-size=128", "num-attention-heads=2")
    with pytest.raises(UserError, match="there is no recipe 'mxfp5'"):
        jobs(write_sweep(recipes=["mxfp5"]))


def test_one_name_for_two_jobs_is_refused(write_sweep: WriteSweep) -> None:
    with pytest.raises(UserError, match="more than one job would be gpt_tiny-bf16-s1"):
        jobs(write_sweep(recipes=["bf16", {"label": "bf16", "recipe": "mxfp4"}]))


def test_switches_that_are_off(write_sweep: WriteSweep) -> None:
    assert flags({"bf16": False, "swiglu": True, "split": "1"}) == ["--no-bf16", "--swiglu", "--split", "1"]
    with pytest.raises(UserError, match="disable-bias-linear: false cannot be said"):
        flags({"disable_bias_linear": False})


def test_jobs_by_pattern(write_sweep: WriteSweep) -> None:
    found = jobs(write_sweep(recipes=["mxfp4", "mxfp4_sr"], seeds=[1, 11]))
    assert [job.id for job in selected(found, ["*-mxfp4-s1"])] == ["gpt_tiny-mxfp4-s1"]
    assert len(selected(found, ["_sr"])) == 2
    assert selected(found, []) == found
    with pytest.raises(UserError, match="--only nothing matches no job"):
        selected(found, ["_sr", "nothing"])


def test_each_start_is_the_same(write_sweep: WriteSweep, tmp_path: Path) -> None:
    """So a job that begins with other weights goes on from its own checkpoint, as any run does in --save's folder."""
    job = jobs(write_sweep(options={"pretrained-checkpoint": "weights", "finetune": True}))[0]
    words = command(job, tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert command(job, tmp_path) == words
    assert words[words.index("--save") + 1] == str(tmp_path)
    assert "--load" not in words
    config, _, _ = parse(words[len(DRIVER) :])
    assert config.exit_signal_handler


def test_options_that_identify_a_run(write_sweep: WriteSweep) -> None:
    """Not how often it speaks; but the file behind its model, its recipe's fields, its processes."""
    path = write_sweep(recipes=["mxfp4_rht"])
    (before,) = jobs(path)
    (talks,) = jobs(path, "log-interval=7", "save-interval=2")
    assert talks.resolved == before.resolved
    (other,) = jobs(path, "lr=0.5")
    assert other.resolved["options"] == {**before.resolved["options"], "lr": 0.5}
    assert before.resolved["options"]["adam_beta2"] == 0.95
    assert before.resolved["recipe"]["dgrad"]["hadamard"]["block"] == 64
    assert jobs(path, processes=2)[0].resolved["processes"] == 2
    assert json.loads(json.dumps(before.resolved)) == before.resolved


@pytest.mark.slow
def test_expanding_loads_neither_torch_nor_megatron(write_sweep: WriteSweep) -> None:
    code = f"""
import sys
from megatron_lowprec.sweep import cli, jobs, spec
print(len(jobs.expand(spec.read({write_sweep()!r}), {{}}, 1)))
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "megatron", "triton", "rich"}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2", "[]"]


def test_the_manifest(write_sweep: WriteSweep, tmp_path: Path) -> None:
    sweep = read(write_sweep(sizes={"tiny": {}}, recipes=["configs/recipes/mxfp8_bf16_ends.yaml"]))
    found = expand(sweep, {"hidden_size": 128}, 1)
    write_manifest(tmp_path / "out", sweep, found)
    expected: dict[str, Any] = {
        "id": "gpt_tiny-mxfp8_bf16_ends-s1",
        "label": "mxfp8_bf16_ends",
        "recipe": "configs/recipes/mxfp8_bf16_ends.yaml",
        "model": "gpt_tiny",
        "variant": None,
        "seed": 1,
        "run": "gpt_tiny-mxfp8_bf16_ends-s1",
    }
    assert read_manifest(tmp_path / "out") == {"name": "sweep", "size": "tiny", "cells": [expected]}
    with pytest.raises(UserError, match=r"holds no sweep\.json"):
        read_manifest(tmp_path)
