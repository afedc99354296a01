"""Training with FP8 primary weights: near an ordinary run, whole after a skipped step, refused without FP8 weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lowprec import UserError
from megatron_lowprec.mcore.optim.fp8_param_gather import finalize
from megatron_lowprec.training import loop
from megatron_lowprec.training.monitoring.bad_numbers import weights_are_finite
from tests.launch import torchrun
from tests.training.conftest import Drive, driving
from tests.training.helpers import argv, rows
from tests.training.monitoring.test_bad_numbers import at, spoiling
from tests.training.primary_weights.cases import COMMON, EACH_TIME, FLAG, OVERLAP, RECIPES, WORKER, lm_losses
from tests.training.primary_worker import Digests, looking
from tests.weekly import also_weekly


@pytest.mark.slow
def test_it_trains_as_with_bf16_weights(one: tuple[str, Path, Digests]) -> None:
    recipe, folder, _ = one
    with driving(folder) as call:
        call(argv(save="plain", no_save=True, **COMMON, **RECIPES[recipe]))
    plain, primary = lm_losses(folder / "plain"), lm_losses(folder / "out")
    # the first weights are bf16's own, later main weights are not rounded to it
    assert primary[0] == plain[0]
    assert primary != plain
    assert primary == pytest.approx(plain, rel=1e-3)


def test_a_skipped_step_leaves_the_weights_alone(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiling(monkeypatch, "wgrad", at(2, "mlp.linear_fc1", step=2, microbatch=0))
    with looking() as digests:
        drive(argv(save="out", recipe="fp8_delayed", no_save=True, **COMMON, **FLAG))
    assert [row["skipped iterations"] for row in rows(Path("out"))] == [0, 0, 1, 1]
    assert digests[3] == digests[2]
    assert digests[4] != digests[3]


@pytest.mark.parametrize("recipe", also_weekly(RECIPES, EACH_TIME))
def test_a_main_weight_that_is_not_finite_is_seen(drive: Drive, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    seen = []

    def step(trainer: Any, *rest: Any, inner: Any = loop.train_step) -> Any:
        result = inner(trainer, *rest)
        seen.append(weights_are_finite(trainer))
        weight = trainer.chunks[0].module.module.decoder.layers[0].mlp.linear_fc1.weight
        weight.main_param[5] = torch.inf
        finalize(trainer.optimizer, trainer.chunks)
        seen.append(weights_are_finite(trainer))
        return result

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(UserError, match="after iteration 1 the weights are not finite"):
        drive(argv(save="out", no_save=True, **COMMON | FLAG | RECIPES[recipe] | {"train_iters": 1}))
    assert seen == [True, False]


def test_recipes_without_one_fp8_weight_are_refused(drive: Drive) -> None:
    with pytest.raises(UserError, match="mxfp8 takes the weight in fprop e4m3 by 1x32"):
        drive(argv(save="out", recipe="mxfp8", **COMMON, **FLAG))
    assert not torch.distributed.is_initialized()


def test_layers_that_stay_in_bf16_are_ordinary(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    options = COMMON | FLAG | {"train_iters": 2, "rerun_in_bf16": ["layers.1.mlp.linear_fc1.dgrad"]}
    with looking() as digests:
        drive(argv(save="out", recipe="fp8_current", no_save=True, **options))
    assert "--fp8-param-gather: 7 weights on this stage are FP8, without a bf16 copy" in capsys.readouterr().out
    assert all(len(found) == 7 for found in digests)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", also_weekly(RECIPES, EACH_TIME))
def test_native_runs_are_near_emulated_ones(tmp_path: Path, recipe: str) -> None:
    common = COMMON | FLAG | {"hidden_size": 128, "train_iters": 20, "lr_decay_style": "constant"} | RECIPES[recipe]
    runs = {"native": {}, "emulated": {"emulate": True}, "overlapped": OVERLAP, "ordinary": {"fp8_param_gather": None}}
    command_lines = {name: argv(**{"save": name, "no_save": True} | common | more) for name, more in runs.items()}
    (tmp_path / "cases.json").write_text(json.dumps(command_lines))
    done = torchrun(1, [WORKER, "cases.json"], tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    said = dict(zip(runs, done.stdout.split("--- ")[1:], strict=True))
    assert "fprop, dgrad, wgrad: hopper_fp8" in said["native"]
    assert "fprop, dgrad, wgrad: emulated" in said["emulated"]
    found = {name: lm_losses(tmp_path / name) for name in runs}
    assert found["native"] != found["emulated"]
    for name in ("emulated", "overlapped", "ordinary"):
        assert found["native"] == pytest.approx(found[name], rel=1e-2), name
