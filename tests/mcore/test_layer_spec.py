"""A GPTModel from ``layer_spec`` in a loop without calls trains as one with ``bind_recipe`` and all of its calls."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron_lowprec import get_recipe
from tests.mcore.spec_loop import (
    LAYERS,
    MICROBATCHES,
    RECIPES,
    RECOMPUTE,
    SEED,
    STEPS,
    Loop,
    assert_same,
    expected,
    explicit,
    gpt,
    tracked,
)

pytestmark = pytest.mark.usefixtures("world", "bounded")


@pytest.mark.parametrize("indexed", [True, False], ids=["schedule's index", "counted"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_microbatches_and_steps_are_followed_without_calls(recipe: str, indexed: bool) -> None:
    loop = Loop(tracked(recipe))
    for _ in range(STEPS):
        loop.run(indexed=indexed)
    assert_same(loop, expected(recipe))


def test_phases_are_followed_without_calls(capsys: pytest.CaptureFixture[str]) -> None:
    rules = "rules: [{first: 1, gemms: mxfp8}, {layers: [layers.2.mlp.linear_fc2], gemms: bf16}]"
    given = "fp8_delayed", f"phases=[{{from_step: 1, dgrad: fp8_current, {rules}}}]"
    loop, by_calls = Loop(tracked(*given)), explicit(*given)
    for _ in range(2):
        loop.run()
        by_calls.run()
    assert_same(loop, (by_calls.losses, by_calls.state()))
    first, last = (layer.mlp.linear_fc1.bound_gemms.recipe.gemms for layer in loop.model.decoder.layers)
    delayed, current = get_recipe("fp8_delayed").gemms, get_recipe("fp8_current").gemms
    assert (first, last) == (get_recipe("mxfp8").gemms, delayed | {"dgrad": current["dgrad"]})
    printed = capsys.readouterr().out
    assert printed.count("phases of the recipe: 1 from iteration 2; in force: ") == 2


def test_a_loaded_model_is_evaluated_in_its_phase() -> None:
    given = "mxfp8", "phases=[{from_step: 1, gemms: fp8_current}]"  # which draws nothing
    whole, loaded = Loop(tracked(*given)), Loop(tracked(*given))
    for _ in range(2):
        whole.run()
    loaded.model.load_state_dict(whole.model.state_dict())
    assert loaded.model.decoder.layers[0].tracker.steps == 2
    assert loaded.evaluate() == whole.evaluate()


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluations_in_between_change_nothing(recipe: str) -> None:
    loop = Loop(tracked(recipe))
    loop.evaluate()
    for _ in range(STEPS):
        loop.run(evaluate=True)
        assert loop.evaluate() == loop.evaluate()
    assert_same(loop, expected(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_repeats_the_draws(recipe: str) -> None:
    loop = Loop(tracked(recipe, **RECOMPUTE))
    for _ in range(STEPS):
        loop.run()
    assert_same(loop, expected(recipe))


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skipped_update_ends_its_step_and_leaves_no_history(recipe: str, skipped: int) -> None:
    loop = Loop(tracked(recipe))
    for step in range(STEPS):
        loop.run(update=step != skipped)
    assert_same(loop, expected(recipe, skipped))


@pytest.mark.parametrize(("recipe", "draws"), [("mxfp8", False), ("mxfp4_rht_sr", True)])
def test_the_step_after_a_skipped_update_has_draws_of_its_own(recipe: str, draws: bool) -> None:
    """On the same weights and tokens only draws can differ."""
    loop = Loop(tracked(recipe))
    loop.run(update=False)
    first = loop.state()
    loop.run(update=False)
    second = loop.state()
    assert loop.losses[MICROBATCHES:] == loop.losses[:MICROBATCHES]
    assert any(not torch.equal(second[name], first[name]) for name in first) == draws


@pytest.mark.parametrize("tells", [False, True])
def test_steps_continue_at_the_loaded_checkpoint(tells: bool) -> None:
    """Behind a skipped update, in a process that has gone on; of earlier checkpoints, without steps, the loop tells."""
    whole, resumed = Loop(tracked("mxfp4_rht_sr")), Loop(tracked("mxfp4_rht_sr"))
    whole.run()
    whole.run(update=False)
    saved, sharded = copy.deepcopy(whole.model.state_dict()), whole.model.sharded_state_dict()
    linears = [key for key in saved if key.endswith("_extra_state") and ".linear_" in key]
    assert [int(saved[key]["steps"]) for key in linears] == [2] * 4 * LAYERS
    assert all(sharded[key].data["steps"] == 2 for key in linears)
    tracker = resumed.model.decoder.layers[0].tracker
    tracker.steps = 9
    resumed.backward(0)
    if tells:
        saved |= dict.fromkeys(linears)
        resumed.optimizer.step()  # which ends the step
        tracker.steps = 2
    resumed.model.load_state_dict(saved)
    for loop in (whole, resumed):
        loop.run()
    assert_same(resumed, (whole.losses[2 * MICROBATCHES :], whole.state()))


def test_two_models_in_one_process_do_not_disturb_each_other() -> None:
    loops = {recipe: Loop(tracked(recipe)) for recipe in RECIPES}
    for _ in range(STEPS):
        for loop in loops.values():
            loop.run()
    for recipe, loop in loops.items():
        assert_same(loop, expected(recipe))


def test_two_models_may_accumulate_gradients_in_turn() -> None:
    """Each at a step of its own: a microbatch of one does not take the other's step for its draws."""
    found = []
    for other in (None, Loop(tracked("mxfp8"))):
        loop = Loop(tracked("mxfp4_rht_sr"))
        loop.model.decoder.layers[0].tracker.steps = 5
        for index in range(MICROBATCHES):
            loop.backward(index)
            if other is not None:
                other.backward(index)
        found.append(loop.state())
    assert [name for name in found[0] if not torch.equal(found[1][name], found[0][name])] == []


def test_a_spec_of_one_s_own_by_low_precision() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_lowprec.mcore.layer_spec import layer_spec
    from megatron_lowprec.mcore.layers.gpt_spec import low_precision

    stock = get_gpt_layer_local_spec()
    layer = layer_spec(get_recipe("fp8_delayed"), seed=SEED).module
    loop = Loop(gpt(ModuleSpec(module=layer, submodules=low_precision(stock).submodules)))
    for _ in range(STEPS):
        loop.run()
    assert_same(loop, expected("fp8_delayed"))
    unchanged = gpt(ModuleSpec(module=layer_spec(get_recipe("bf16")).module, submodules=stock.submodules))
    assert not any("LowPrec" in type(linear).__name__ for linear in unchanged.decoder.layers[0].mlp.children())
