"""How often the amax histories of a model move: at the end of a step, or of each microbatch."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lowprec import KeepBf16, get_recipe
from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.coverage import with_current_scales
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import GEMM_OPERANDS, HistorySpec
from tests.mcore.test_rng_step import build

pytestmark = pytest.mark.usefixtures("world")

FIELDS = [f"{gemm}.{operand}.history_update" for gemm, operands in GEMM_OPERANDS.items() for operand in operands]


def moving(update: str) -> Recipe:
    recipe = load_recipe("fp8_delayed", [f"{field}={update}" for field in FIELDS])
    assert set(recipe.delayed_operands().values()) == {HistorySpec(1024, "max", update)}  # type: ignore[arg-type]
    return replace(recipe, name="fp8_delayed")


def step_of_two_microbatches(recipe: Recipe) -> list[dict[str, float]]:
    """Amax in effect of the first layer's tensors: before the step, in its second microbatch, and after the step. The
    first microbatch's input is 100 times larger.
    """
    from megatron_lowprec.mcore.runtime import bind_recipe

    block, _ = build()
    runtime = bind_recipe([block], recipe, num_layers=4, seed=1, accumulate_wgrad=False)
    histories = block.layers[0].self_attention.linear_qkv.linear_gemms.histories

    def in_effect() -> dict[str, float]:
        return {operand: float(history.in_effect[slot]) for operand, (history, slot) in histories.items()}

    found = [in_effect()]
    runtime.begin_step(3)
    for microbatch in range(2):
        runtime.begin_microbatch(microbatch)
        if microbatch:
            found.append(in_effect())
        x = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(microbatch))
        block(hidden_states=x * (1 if microbatch else 100), attention_mask=None).square().sum().backward()
    runtime.end_step()
    return [*found, in_effect()]


def test_an_entry_a_step_holds_the_scale_through_the_step() -> None:
    before, within, after = step_of_two_microbatches(moving("step"))
    assert set(before.values()) == set(within.values()) == {0.0}
    assert min(after["input"], after["weight"]) > 0


def test_an_entry_a_microbatch_moves_the_scale_within_the_step() -> None:
    before, within, after = step_of_two_microbatches(moving("microbatch"))
    assert set(before.values()) == {0.0}
    # at scale 1 no gradient has come through the layers behind yet
    assert min(within["input"], within["weight"]) > 0
    assert all(after[operand] >= amax for operand, amax in within.items())


def after_inf_in_the_first_microbatch() -> Any:
    """The runtime of a layer, in a step."""
    from megatron_lowprec.mcore.runtime import bind_recipe

    block, _ = build()
    runtime = bind_recipe([block], moving("microbatch"), num_layers=4, seed=1, accumulate_wgrad=False)
    runtime.begin_step(0)
    block(hidden_states=torch.full((32, 2, 64), torch.inf), attention_mask=None)
    return runtime


def test_a_skipped_step_leaves_no_trace_of_its_last_microbatch() -> None:
    runtime = after_inf_in_the_first_microbatch()
    runtime.end_step(updated=False)
    assert all(float(history.newest.sum()) == 0.0 for history in runtime._histories.values())


def test_an_inf_of_an_earlier_microbatch_enters_no_window() -> None:
    """It would pin the scale for the whole window, although the loop skips the step."""
    runtime = after_inf_in_the_first_microbatch()
    runtime.begin_microbatch(1)
    assert all(history.window.isfinite().all() for history in runtime._histories.values())


def test_layers_that_no_pass_has_run_keep_their_windows() -> None:
    """Of all layers of the model, which share one update."""
    from megatron_lowprec.mcore.runtime import bind_recipe

    block, _ = build()
    runtime = bind_recipe([block], get_recipe("fp8_delayed"), num_layers=4, seed=1, accumulate_wgrad=False)
    first, last = (
        block.layers[i].self_attention.linear_qkv.linear_gemms.histories["input"][1] for i in (0, len(block.layers) - 1)
    )
    for step, layers in enumerate((block, block.layers[0], block.layers[0])):
        runtime.begin_step(step)
        layers(hidden_states=torch.randn(32, 2, 64), attention_mask=None)
        runtime.end_step()
    (history,) = runtime._histories.values()
    assert history.window[:4, first].count_nonzero() == 3
    assert history.window[:4, last].count_nonzero() == 1
    assert history.window[0, last] == history.in_effect[last] > 0


def test_a_state_that_is_loaded_replaces_what_was_recorded() -> None:
    """As in a rollback within a process; a state dict of another recipe lets the histories begin anew."""
    block, runtime = build("fp8_delayed")
    (history,) = runtime._histories.values()
    linear = block.layers[0].self_attention.linear_qkv
    x = torch.randn(32, 2, 64)
    linear(x)
    runtime.end_step()
    saved, window = linear.state_dict(), history.window.clone()
    linear(1000 * x)  # of a step that is then abandoned
    linear.load_state_dict(saved)
    runtime.end_step()
    assert torch.equal(history.window, window)
    linear.load_state_dict({**saved, "_extra_state": None})
    assert window.any()
    assert not history.window.any()


def test_a_model_in_evaluation_only_scales_by_current_amaxes() -> None:
    """As where a checkpoint of another recipe is evaluated; layers that the recipe keeps in bf16 have no say."""
    from megatron_lowprec.mcore.runtime import bind_recipe

    recipe, options = get_recipe("fp8_delayed"), {"num_layers": 4, "seed": 1, "accumulate_wgrad": False}
    recipe = replace(recipe, keep_bf16=KeepBf16(first_layers=1))
    found, x = [], torch.randn(32, 2, 64) * 2000
    for each in (recipe, with_current_scales(recipe, recipe.delayed_operands())):
        block, _ = build()
        bind_recipe([block], each, **options)
        with torch.no_grad(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.append(block.eval()(hidden_states=x, attention_mask=None))
        messages = {str(one.message) for one in said}
        name = "fp8_delayed scales by current amaxes: no step in training has recorded any yet"
        assert messages == ({name} if each is recipe else set())
    assert torch.equal(*found)


def test_a_pipeline_that_recomputes_is_refused() -> None:
    from megatron_lowprec.mcore.runtime import bind_recipe

    block: Any = build()[0]
    linear = block.layers[0].self_attention.linear_qkv
    linear.config = replace(linear.config, recompute_granularity="selective")
    linear.config.pipeline_model_parallel_size = 2
    with pytest.raises(UserError, match="history_update microbatch: in a pipeline"):
        bind_recipe([block], moving("microbatch"), num_layers=4, seed=1)
    bind_recipe([block], get_recipe("fp8_delayed"), num_layers=4, seed=1)
