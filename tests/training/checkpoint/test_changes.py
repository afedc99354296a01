"""Whatever a resumed run changes about its updates is recorded: what is not recorded is on a list."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec import UserError, load_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.report import groups
from megatron_lowprec.training.checkpoint import changes, loader, storage
from megatron_lowprec.training.checkpoint.resume import Saved, recipe_to_continue, stored_weights
from megatron_lowprec.training.config.options import NO_EFFECT, OPTIONS, Config
from megatron_lowprec.training.config.phase_options import check_phase_iters, continued_phases, with_steps
from megatron_lowprec.training.schedule import Schedule, plan
from tests.training.checkpoint.forms import change

DEFAULT = Config(num_layers=2, hidden_size=64, seq_length=32, global_batch_size=4, lr=1e-3)
NAMES = [field.name for field in fields(Config)]


def schedule() -> Schedule:
    return plan(DEFAULT, 4, 40)[0]


def saved(config: Config) -> Saved:
    options = {name: value for name, value in asdict(config).items() if value is not None}
    content = {"options": options, "schedule": schedule().to_dict(), "progress": {"iteration": 3}}
    return Saved(Path("there"), content)


def another(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    return [*value, "one more"] if isinstance(value, list) else value + type(value)(1)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_option_is_recorded_unless_it_is_on_the_list(name: str) -> None:
    now = replace(DEFAULT, **{name: another(getattr(DEFAULT, name))})
    found = changes.earlier_options(saved(DEFAULT), now, schedule())
    before = getattr(DEFAULT, name) if OPTIONS[name].formerly is None else OPTIONS[name].formerly
    if name == "no_load_optim":  # of a start, not of the options
        assert found == [{"until_iteration": 3, name: False}]
    elif name in changes.NOT_RECORDED:
        assert found == []
    else:
        assert found == [{"until_iteration": 3, name: before}]
        assert changes.option_notes(saved(DEFAULT), now) or name in changes._NOTED


# Options whose change was hidden, and others of their kind.
@pytest.mark.parametrize(
    "name",
    [
        *("rerun_in_bf16", "calculate_per_token_loss", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("moe_router_bias_update_rate", "moe_router_load_balancing_type", "no_amax_reduce", "share_rng_across_dp"),
        *("emulate_accumulator", "grad_reduce_in_bf16", "no_gradient_accumulation_fusion", "transformer_impl"),
        *("train_data_path", "data_path", "data_phase_path", "data_phase_switch_samples", "split", "seq_length"),
        *(
            "sft_tokenizer_prompt_format",
            "global_batch_size",
            "micro_batch_size",
            "clip_grad",
            "adam_eps",
            "hidden_dropout",
            "seed",
        ),
    ],
)
def test_options_that_determine_updates_may_not_change(name: str) -> None:
    assert name in NAMES
    assert name not in changes.NOT_RECORDED


def test_a_version_without_an_option_is_one_that_had_it_off() -> None:
    now = replace(DEFAULT, fp8_accumulate_wgrad=False)
    assert changes.earlier_options(saved(DEFAULT), now, schedule()) == []
    assert changes.option_notes(saved(DEFAULT), now) == []


def test_the_lists_name_options() -> None:
    assert set(NAMES) >= changes.NOT_RECORDED | NO_EFFECT | groups._IGNORED


def test_an_earlier_change_stays_recorded() -> None:
    before = saved(DEFAULT)
    before.content["earlier_options"] = [{"until_iteration": 1, "clip_grad": 0.5}]  # type: ignore[index]
    assert changes.earlier_options(before, DEFAULT, schedule()) == [{"until_iteration": 1, "clip_grad": 0.5}]


PHASED = load_recipe("fp8_current", ["phases=[{from_fraction: 0.5, gemms: bf16}]"])
MOVED = load_recipe("fp8_current", ["phases=[{from_fraction: 0.4, gemms: bf16}]"])


@pytest.mark.parametrize(
    ("recipe", "saved_options", "asked", "begins"),
    [
        (PHASED, {"train_iters": 4}, None, 2),  # begun at 2 of 4, it stays begun in a run of 10
        (PHASED, {"train_iters": 8, "recipe_phase_iters": 4}, None, 2),  # the second resume
        (PHASED, {"train_iters": 10}, None, 5),
        (PHASED, {"train_iters": 4}, 8, 4),
        (MOVED, {"train_iters": 4}, None, 4),  # not the checkpoint's phase
        (PHASED, {}, None, 5),
    ],
)
def test_a_phase_stays_where_it_began(
    recipe: Recipe, saved_options: dict[str, Any], asked: int | None, begins: int
) -> None:
    config = replace(DEFAULT, train_iters=10, recipe_phase_iters=asked)
    given = set() if asked is None else {"recipe_phase_iters"}
    config, notes = continued_phases(config, recipe, saved_options, PHASED, given)
    kept = asked is None and begins == 2
    assert [note for note in notes if "fractions of 4 iterations" in note] == notes
    assert len(notes) == kept
    assert with_steps(recipe, config).phases[0].begins(config.train_iters) == begins
    before = saved(replace(DEFAULT, **saved_options))
    recorded = changes.earlier_options(before, config, schedule())
    assert recorded == ([{"until_iteration": 3, "recipe_phase_iters": 4}] if asked else [])


def test_iterations_of_phases_need_a_fraction() -> None:
    with pytest.raises(UserError, match="--recipe-phase-iters 4 does nothing: no phase of recipe bf16 begins at"):
        check_phase_iters(replace(DEFAULT, recipe_phase_iters=4), load_recipe("bf16"))


@pytest.mark.parametrize(
    ("before", "by_default", "given", "recipe", "after", "note"),
    [
        (False, True, (), "fp8_delayed", False, "--fp8-param-gather: off, as in the checkpoint's run"),
        # of a version without it
        (None, True, (), "fp8_delayed", False, "--fp8-param-gather: off, as in the checkpoint's run"),
        (False, True, ("fp8_param_gather",), "fp8_delayed", True, None),
        (True, True, (), "fp8_delayed", True, None),
        (False, True, (), "fp8_lm_o3", True, None),  # which needs them
        (True, False, (), "fp8_delayed", False, "--fp8-param-gather: off, where the checkpoint's run had FP8 weights"),
    ],
)
def test_a_resumed_run_keeps_its_weights_storage(
    before: bool | None, by_default: bool, given: tuple[str, ...], recipe: str, after: bool, note: str | None
) -> None:
    now = replace(DEFAULT, fp8_param_gather=by_default)
    checkpoint = saved(replace(DEFAULT, fp8_param_gather=before))
    config, notes = stored_weights(checkpoint, now, load_recipe(recipe), frozenset(given))
    assert config == replace(now, fp8_param_gather=after)
    assert len(notes) == (note is not None)
    assert all(found.startswith(note or "") for found in notes)


def test_a_recipe_that_is_refused_is_told_with_its_checkpoint(folder: Path) -> None:
    """As an older version wrote it: by each way to open it, with the field."""
    config = folder / "config.yaml"
    change(folder, "config.yaml", config.read_bytes().replace(b"margin: 0", b"margin: 64", 1))
    (folder.parent / storage.TRACKER).write_text("4\n")
    words = rf"checkpoint {folder}: this version refuses its recipe fp8_delayed; .*\(fprop\.input: margin 64 was asked"
    with pytest.raises(UserError, match=words):
        loader.reopen(loader.find(str(folder)), 1, False)
    assert loader.reopen(loader.find(str(folder)), 1, False, recipe="bf16").recipe.name == "bf16"
    with pytest.raises(UserError, match=words):
        recipe_to_continue(Config(save=str(folder.parent)))
