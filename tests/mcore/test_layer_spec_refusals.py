"""What ``layer_spec`` refuses: rules, phases, layers and configs that no recipe can reach."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron_lowprec import UserError, get_recipe, load_recipe
from megatron_lowprec.recipe.recipe import Phase
from tests.mcore.spec_loop import LAYERS, SEED, Loop, gpt, tracked

pytestmark = pytest.mark.usefixtures("world", "bounded")


def test_a_gradient_to_differentiate_is_refused() -> None:
    loop = Loop(tracked("mxfp8"))
    weight = loop.model.decoder.layers[-1].mlp.linear_fc2.weight
    with pytest.raises(UserError, match=r"create_graph=True reached layers\.2\.mlp\.linear_fc2 under recipe mxfp8"):
        torch.autograd.grad(loop.loss(0), weight, create_graph=True)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{layers: [layers.2.mlp.linear_fc3]", "'layers.2.mlp.linear_fc3', which matches no linear layer; layers are "),
        ("{first: 9", "first is 9, but the model has 2 layers; lower it"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused_as_the_model_is_built(rule: str, message: str) -> None:
    for change in (f"rules=[{rule}, gemms: bf16}}]", f"phases=[{{from_step: 1, rules: [{rule}, gemms: bf16}}]}}]"):
        with pytest.raises(UserError, match=message):
            tracked("mxfp8", change)


def test_rules_are_checked_against_the_layers_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first of two stages: a rule for the second passes, one for no stage is named with the nearest path."""
    from megatron_lowprec.mcore import placement
    from megatron_lowprec.mcore.runtime import bind_recipe
    from megatron_lowprec.recipe.layer_match import Layer

    def gather(found: list[Any], mine: list[Layer], group: Any) -> None:
        found[:] = mine, [layer._replace(number=layer.number + LAYERS) for layer in mine]

    two = {"get_pipeline_model_parallel_world_size": lambda: 2, "get_pipeline_model_parallel_group": MagicMock()}
    two["get_pipeline_model_parallel_group"].return_value.size.return_value = 2  # type: ignore[attr-defined]
    monkeypatch.setattr(placement, "parallel_state", MagicMock(wraps=placement.parallel_state, **two))
    monkeypatch.setattr(placement.dist, "all_gather_object", gather)
    # where Megatron-LM builds its optimizers
    builders = dict.fromkeys(("get_megatron_optimizer", "get_megatron_muon_optimizer"), lambda *_: SimpleNamespace())
    training = SimpleNamespace(**builders)
    monkeypatch.setitem(sys.modules, "megatron.training.training", training)
    stage = {"num_layers": 2 * LAYERS, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    for linear, message in (("linear_fc1", None), ("linear_fc3", "layers are named like layers.4.mlp.linear_fc[12]")):
        change = f"rules=[{{layers: [layers.4.mlp.{linear}], gemms: bf16}}]"
        model = tracked("mxfp8", change, **stage)
        for build in (training.get_megatron_optimizer, training.get_megatron_muon_optimizer):
            with nullcontext() if message is None else pytest.raises(UserError, match=message):
                build(None, [model])
        with nullcontext() if message is None else pytest.raises(UserError, match=message):
            bind_recipe([model], load_recipe("mxfp8", [change]), num_layers=2 * LAYERS, seed=SEED)
    training.get_megatron_optimizer(None, [])  # a stage without layers


def test_a_fraction_of_a_run_needs_its_length() -> None:
    from megatron_lowprec.mcore.layer_spec import layer_spec

    halved = load_recipe("mxfp8", ["phases=[{from_fraction: 0.5, fprop: bf16}]"])
    with pytest.raises(UserError, match=r"from_fraction 0\.5 of a run whose number of steps is unknown: .*total_steps"):
        layer_spec(halved)
    tracker = layer_spec(halved, total_steps=100).module.tracker
    assert tracker.recipe.phases[0].begins(tracker._options["total_steps"]) == 50
    with pytest.raises(
        UserError, match=r"phases 1 and 2 of recipe .* both begin at iteration 51 of 100, so phase 1 wo"
    ):
        layer_spec(replace(halved, phases=(*halved.phases, Phase(from_step=50))), total_steps=100)


@pytest.mark.parametrize("subclass", [False, True])
def test_a_linear_of_another_s_is_named(subclass: bool) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_lowprec.mcore.layer_spec import layer_spec
    from megatron_lowprec.mcore.layers.gpt_spec import low_precision

    submodules = low_precision(get_gpt_layer_local_spec()).submodules
    foreign = type("Foreign", (RowParallelLinear,), {}) if subclass else RowParallelLinear
    submodules.self_attention.submodules.linear_proj = foreign
    layer = layer_spec(get_recipe("mxfp8")).module
    with pytest.raises(
        RuntimeError, match=r"no recipe reaches self_attention\.linear_proj of layer 1, .*low_precision"
    ):
        gpt(ModuleSpec(module=layer, submodules=submodules))


def test_recipes_and_configs_that_the_layers_cannot_run_are_refused() -> None:
    from megatron_lowprec.mcore.layer_spec import layer_spec

    with pytest.raises(UserError, match="fp8_lm also quantizes optimizer state, gradients or weights"):
        layer_spec(get_recipe("fp8_lm"))
    with pytest.raises(UserError, match=r"TransformerConfig\.mtp_num_layers is 1"):
        tracked("mxfp8", mtp_num_layers=1)
    with pytest.raises(UserError, match="gradient_accumulation_fusion needs apex"):
        tracked("mxfp8", gradient_accumulation_fusion=True)
