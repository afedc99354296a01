"""Schedules fit any length of run, and a continued run keeps the one that it has followed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.training import model
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.schedule import Schedule, continued, plan
from tests.training.helpers import argv


def planned(**changes: Any) -> tuple[Schedule, list[str]]:
    config = resolve_run(resolve_model(parse(argv(**changes))[0]), 1, gpus=False)
    return plan(config, config.steps.global_batch_size, config.steps.samples)


def test_horizon_defaults_to_the_run_and_is_counted_in_samples() -> None:
    assert planned(train_iters=10)[0].decay_samples == 40
    assert planned(train_iters=10, lr_decay_iters=25)[0].decay_samples == 100
    assert planned(train_iters=10, lr_decay_samples=33)[0].decay_samples == 33
    assert planned(train_iters=None, train_samples=41)[0].decay_samples == 41
    ramped = {"micro_batch_size": 1, "rampup_batch_size": [2, 2, 8]}
    assert planned(train_iters=None, train_samples=20, **ramped)[0].decay_samples == 20


@pytest.mark.parametrize(
    ("changes", "warmup", "shortened"),
    [
        ({"train_iters": 100, "lr_warmup_fraction": 0.1}, 40, False),
        ({"train_iters": 100, "lr_warmup_iters": 10}, 40, False),
        ({"train_iters": 100, "lr_warmup_samples": 30}, 30, False),
        ({"train_iters": 10, "lr_warmup_iters": 10}, 20, True),
        ({"train_iters": 1, "lr_warmup_iters": 10}, 0, True),
        ({"train_iters": 1, "lr_warmup_fraction": 0.02}, 0, False),
        ({"train_iters": 3, "lr_warmup_samples": 10**9}, 4, True),
    ],
)
def test_warm_up_fits(changes: dict[str, Any], warmup: int, shortened: bool) -> None:
    schedule, notes = planned(**changes)
    assert schedule.warmup_samples == warmup < schedule.decay_samples
    assert len(notes) == shortened


def test_weight_decay_that_grows_needs_both_ends() -> None:
    with pytest.raises(UserError, match="--end-weight-decay"):
        planned(weight_decay_incr_style="cosine", start_weight_decay=0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr_warmup_iters": 1, "lr_warmup_init": 10.0}, "--lr-warmup-init 10 is above --lr"),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "--start-weight-decay 0.2 is above --end-weight-decay 0.1",
        ),
    ],
)
def test_a_schedule_that_would_fall_where_it_grows_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(**options)


def resumed(before: dict[str, Any], now: dict[str, Any], **changes: Any) -> tuple[Schedule, Schedule, list[str]]:
    """The checkpoint's schedule, that of the run which resumes it with ``changes`` to its options, and the notes."""
    saved, options = planned(**before)[0], asdict(resolve_run(resolve_model(parse(argv(**before))[0]), 1, gpus=False))
    config, given, _ = parse(argv(**now))
    config = replace(resolve_run(resolve_model(config), 1, gpus=False), **changes)
    known = {name: value for name, value in options.items() if value is not None}
    return saved, *continued(planned(**now)[0], saved, config, known, given)


def test_a_longer_run_keeps_the_checkpoints_horizon_with_a_note() -> None:
    runs: tuple[dict[str, Any], dict[str, Any]] = {"train_iters": 10}, {"train_iters": 20}
    saved, schedule, notes = resumed(*runs)
    assert schedule == saved
    assert len(notes) == 1
    assert "40" in notes[0]
    assert "80" in notes[0]
    assert resumed(*runs, override_opt_param_scheduler=True)[1:] == (planned(train_iters=20)[0], [])


def test_a_given_horizon_wins() -> None:
    runs: tuple[dict[str, Any], dict[str, Any]] = {"train_iters": 10}, {"train_iters": 20, "lr_decay_iters": 15}
    _, schedule, notes = resumed(*runs)
    assert schedule.decay_samples == 60
    assert notes
    saved, schedule, _ = resumed(*runs, use_checkpoint_opt_param_scheduler=True)
    assert schedule == saved


def test_a_changed_learning_rate_applies_with_a_note() -> None:
    _, schedule, notes = resumed({"train_iters": 10}, {"train_iters": 10, "lr": 5e-4})
    assert schedule.max_lr == 5e-4
    assert "max_lr" in notes[0]


WSD: dict[str, Any] = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3}


@pytest.mark.parametrize("batch", [2, 8, 16])
@pytest.mark.parametrize(
    "lengths",
    [
        {"lr_warmup_iters": 3},
        {"lr_warmup_fraction": 0.2},
        {"lr_warmup_samples": 12},
        {"lr_decay_iters": 8},
        {"lr_decay_iters": 8, "lr_warmup_fraction": 0.25},
        {"lr_decay_iters": 8, "lr_warmup_iters": 2, **WSD},
        WSD,
    ],
    ids=str,
)
def test_another_batch_size_moves_no_length(lengths: dict[str, Any], batch: int) -> None:
    """The same options, in iterations, are other samples at another batch size: a finished warm-up would come back."""
    run = {"train_iters": 10, **lengths}
    saved, schedule, notes = resumed(run, {**run, "global_batch_size": batch})
    assert schedule == saved
    assert notes, "what the options would be is said"


@pytest.mark.parametrize(
    ("change", "field", "samples"),
    [
        ({"lr_warmup_iters": 3}, "warmup_samples", 24),
        ({"lr_warmup_iters": None, "lr_warmup_fraction": 0.5}, "warmup_samples", 20),  # of the kept horizon
        ({"lr_warmup_iters": None, "lr_warmup_samples": 10}, "warmup_samples", 10),
        ({"lr_decay_iters": 9}, "decay_samples", 72),
        ({"lr_decay_iters": None, "lr_decay_samples": 50}, "decay_samples", 50),
        ({"lr_wsd_decay_iters": 2}, "wsd_decay_samples", 16),
    ],
    ids=str,
)
def test_a_changed_length_is_read_with_this_run_s_batch(change: dict[str, Any], field: str, samples: int) -> None:
    """The others stay the checkpoint's."""
    run = {"train_iters": 10, "lr_warmup_iters": 2, "lr_decay_iters": 10, **WSD}
    saved, schedule, _ = resumed(run, {**run, "global_batch_size": 8, **change})
    assert schedule == replace(saved, **{field: samples})


def test_a_warm_up_fits_into_a_horizon_that_was_shortened() -> None:
    run = {"train_iters": 10, "lr_warmup_iters": 5, **WSD}
    _, schedule, _ = resumed(run, {**run, "lr_decay_iters": 2})
    assert schedule.warmup_samples < schedule.decay_samples == schedule.wsd_decay_samples == 8


@pytest.mark.parametrize(("iters", "samples", "noted"), [(5, 20, False), (6, 24, False), (7, 24, True), (20, 24, True)])
def test_the_last_phase_begins_behind_the_warm_up(iters: int, samples: int, noted: bool) -> None:
    schedule, notes = planned(train_iters=10, lr_warmup_iters=4, lr_decay_style="WSD", lr_wsd_decay_iters=iters)
    assert schedule.wsd_decay_samples == samples
    assert [f"the last phase of WSD, {4 * iters} samples, does not fit" in note for note in notes] == [True] * noted


def test_survives_a_dump() -> None:
    schedule = planned(train_iters=10, lr_decay_style="WSD", lr_wsd_decay_iters=3)[0]
    assert Schedule.from_dict(schedule.to_dict()) == schedule


GROWING: dict[str, Any] = {
    "weight_decay_incr_style": "linear",
    "start_weight_decay": 0.0,
    "end_weight_decay": 0.1,
    "train_iters": 10,
    "lr_decay_iters": 4,
}


@pytest.mark.parametrize(
    ("changes", "samples"), [({}, 40), ({"train_iters": None, "train_samples": 37}, 37)], ids=["iterations", "samples"]
)
def test_weight_decay_grows_over_the_run_and_not_over_the_learning_rate_s_horizon(
    changes: dict[str, Any], samples: int
) -> None:
    schedule = planned(**GROWING | changes)[0]
    assert schedule.decay_samples == 16
    weight = torch.nn.Parameter(torch.zeros(1))
    scheduler = model._scheduler(schedule, torch.optim.AdamW([weight], lr=1.0))  # type: ignore[arg-type]
    scheduler.step(increment=20)
    assert scheduler.get_wd() == pytest.approx(0.1 * 20 / samples)


def test_weight_decay_goes_on_as_the_checkpoint_s_run_had_it() -> None:
    """A checkpoint without the field grew over the learning rate's horizon."""
    old = planned(**GROWING)[0].to_dict()
    del old["weight_decay_incr_samples"]
    saved = Schedule.from_dict(old)
    config, given, _ = parse(argv(**GROWING))
    schedule, notes = continued(planned(**GROWING)[0], saved, config, {}, given)
    assert schedule.weight_decay_incr_samples == 16
    assert len(notes) == 1
    assert "weight decay grows over 16 samples, the checkpoint's" in notes[0]
    assert "options 40" in notes[0]
    overridden = continued(planned(**GROWING)[0], saved, replace(config, override_opt_param_scheduler=True), {}, given)
    assert overridden == (planned(**GROWING)[0], [])


def test_constant_weight_decay_of_an_older_checkpoint_is_not_mentioned() -> None:
    options = {"train_iters": 10, "lr_decay_iters": 4}
    old = planned(**options)[0].to_dict()
    del old["weight_decay_incr_samples"]
    config, given, _ = parse(argv(**options))
    assert continued(planned(**options)[0], Schedule.from_dict(old), config, {}, given) == (planned(**options)[0], [])
