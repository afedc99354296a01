"""Runs under recipes by layer and by phase: a change of phase has the bits of a stop and a resume under its recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_lowprec import load_recipe
from megatron_lowprec.recipe.parsing import recipe_to_dict, same_numerics
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.training import model
from megatron_lowprec.training.checkpoint import loader
from megatron_lowprec.training.model import Trainer
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses

STEPS: dict[str, Any] = {"train_iters": 4, "num_layers": 2, "attention_dropout": 0.1, "recipe": "whole.yaml"}
# histories begin in the first phase, of one layer in the second, where those of input end in the others
PHASED = [
    "rules=[{last: 1, gemms: bf16}, {layers: ['*.linear_proj'], gemms: mxfp8}]",
    "phases=[{from_step: 1, gemms: fp8_delayed}, {from_fraction: 0.7, fprop: bf16, dgrad: fp8_delayed, rules: "
    "[{layers: ['layers.2.mlp.linear_fc1'], gemms: fp8_delayed}]}]",
]
BY_LAYER_AND_TIME = """
base: mxfp4_rht_sr
summary: bf16 in the first layer and the last two, and in the forward pass of the last 18% of the run
fprop: mxfp8
rules:
- {first: 1, last: 2, gemms: bf16}
phases:
- {from_fraction: 0.82, fprop: bf16}
"""


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, torch.Tensor]]:
    """Weights of the last run, and the amax histories that its recipe uses at the end."""
    build, built = model.build, list[Trainer]()

    def kept(*args: Any) -> Trainer:
        built.append(build(*args))
        return built[-1]

    def found() -> dict[str, torch.Tensor]:
        trainer = built[-1]
        used = trainer.runtime.recipe.stages[-1].delayed_operands()
        state = {name: weight.detach().clone() for name, weight in trainer.chunks[0].named_parameters()}
        for layer in trainer.runtime.layers:
            for tensor in used:
                history, slot = layer.histories[tensor]
                state[f"{layer.linear_id.path} {tensor}"] = history.state(slot)
        return state

    monkeypatch.setattr(model, "build", kept)
    return found


def written(recipe: Recipe, name: str) -> str:
    Path(name).write_text(yaml.safe_dump(recipe_to_dict(recipe)))
    return name


def test_a_change_of_phase_has_the_bits_of_a_resume_under_its_recipe(
    drive: Drive, states: Callable[[], dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe("fp8_current", PHASED)
    written(recipe, "whole.yaml")
    drive(argv(**STEPS, save="whole"))
    printed, whole = capsys.readouterr().out, states()
    assert "phases of the recipe: 1 from iteration 2; 2 from iteration 4, 70% of the run; in force: 2\n" in printed
    for number, (stage, stop) in enumerate(zip(recipe.stages, (1, 3, 4), strict=True)):
        changed = {"recipe": written(stage, f"{number}.yaml"), "exit_interval": stop}
        drive(argv(**STEPS | changed, save="parts"))
    assert len(losses(Path("whole"))) == 4
    assert losses(Path("parts")) == losses(Path("whole"))
    parts = states()
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    assert any(" grad_output" in name and bool(state.any()) for name, state in whole.items())
    opened = loader.reopen(loader.find("whole"), 1, gpus=False)
    assert same_numerics(opened.recipe, recipe.stages[-1])
    # a resume in the middle of a phase
    drive(argv(**STEPS, save="again", exit_interval=2))
    drive(argv(**STEPS, save="again"))
    assert losses(Path("again")) == losses(Path("whole"))
    again = states()
    assert [name for name in whole if not torch.equal(whole[name], again[name])] == []


def test_a_recipe_by_layer_and_by_phase_is_a_file(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(BY_LAYER_AND_TIME)
    options = {"recipe": "mine.yaml", "num_layers": 4, "train_iters": 6, "global_batch_size": 2}
    drive(argv(**options, explain_recipe=True))
    before, after = capsys.readouterr().out.split("\nfrom iteration 6, 82% of the run:\n")
    for text in (before, after):
        assert "layers 1, 3-4: mlp.linear_fc1 [64 -> 256]  kept in the compute dtype" in text
    assert "  fprop  emulated" in before
    assert "  fprop  not quantized" in after
    drive(argv(**options, save="mine"))
    printed = capsys.readouterr().out
    assert "phases of the recipe: 1 from iteration 6, 82% of the run; in force: none yet\n" in printed
    assert printed.count("in force: 1\n") == 1
    ran = json.loads(Path("mine/run.json").read_text())["gemms_of_phases"]
    assert {phase: gemms["fprop"].split(" ")[0] for phase, gemms in ran.items()} == {"0": "emulated", "1": "not"}
    # until the last iteration its losses are those of the recipe without the phase
    drive(argv(**options, save="without", recipe_override="phases=[]"))
    found, without = losses(Path("mine")), losses(Path("without"))
    assert found[:5] == without[:5]
    assert found[5] != without[5]
