"""A growing batch: Megatron-core's sizes, and all that counts a run's samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_current_global_batch_size,
    update_num_microbatches,
)

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.releases import init_microbatches
from megatron_lowprec.training import loop
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.rampup import batch_size_at, nearest_end, ramp_sizes, run_length, samples_of
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, rows

# 2 2 | 4 | 6 6 ...: iterations end at 2, 4, 8, 14, 20, 26
RAMP: dict[str, Any] = {
    "micro_batch_size": 1,
    "global_batch_size": 6,
    "rampup_batch_size": [2, 2, 8],
    "train_iters": None,
    "train_samples": 28,
}


def resolved(**changes: Any) -> Config:
    return resolve_run(resolve_model(parse(argv(**changes))[0]), 1, gpus=False)


@pytest.mark.parametrize(
    ("ramp", "batch"),
    [([2, 2, 8], 6), ([1, 1, 10], 8), ([32, 32, 977], 128), ([1, 3, 7], 22), ([1, 1, 3], 9), ([2, 1, 4900], 100)],
)
def test_sizes_are_megatron_core_s(ramp: list[int], batch: int) -> None:
    """Until 0.17 by its ramp; later releases ignore ramps, and get the same sizes as a schedule of steps."""
    init_microbatches(batch, 1, 1, ramp, ramp_sizes(ramp, batch))
    try:
        for consumed in range(ramp[2] + 3):
            update_num_microbatches(consumed)
            assert batch_size_at(ramp, batch, consumed) == get_current_global_batch_size()
    finally:
        destroy_num_microbatches_calculator()


@pytest.mark.parametrize(("ramp", "batch"), [([2, 2, 8], 6), ([32, 32, 977], 128), ([1, 1, 3], 9), ([2, 1, 4900], 100)])
def test_the_table_of_sizes_is_the_rule(ramp: list[int], batch: int) -> None:
    sizes = ramp_sizes(ramp, batch)
    assert list(sizes) == sorted(sizes)
    for consumed in range(ramp[2] + 3):
        assert sizes[max(begin for begin in sizes if begin <= consumed)] == batch_size_at(ramp, batch, consumed)
    assert ramp_sizes(None, batch) == {0: batch}


def test_lengths_and_ends_of_iterations() -> None:
    config = resolved(**RAMP)
    assert (config.train_iters, run_length(config.steps)) == (6, (6, 26))
    assert [samples_of(config.steps, count) for count in range(1, 7)] == [2, 4, 8, 14, 20, 26]
    assert [nearest_end(config.steps, samples) for samples in (0.9, 3, 5, 7, 12, 16, 18, 24)] == [
        0,
        2,
        4,
        8,
        14,
        14,
        20,
        26,
    ]
    # continued after 4 samples without the ramp
    assert run_length(replace(config, rampup_batch_size=None).steps, done=2, consumed=4) == (6, 28)
    assert run_length(resolved(train_iters=5).steps, done=2, consumed=40) == (5, 52)


def test_a_change_of_blend_is_at_the_end_of_an_iteration() -> None:
    data = {"mock_data": None, "train_data_path": ["a.jsonl"], "data_phase_path": ["b.jsonl"]}
    assert resolved(**RAMP, **data, data_phase_switch=0.5).data_phase_switch_samples == 14


def test_the_header_has_the_tokens_of_the_run(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    drive(argv(**RAMP, save="out", min_lr=1e-4))
    assert "6 iterations, 832 tokens" in capsys.readouterr().out
    assert json.loads(Path("out/run.json").read_text())["tokens"] == 26 * 32
    assert [row["consumed samples"] for row in rows(Path("out"))] == [2, 4, 8, 14, 20, 26]
    assert rows(Path("out"))[-1]["learning-rate"] == pytest.approx(1e-3 - 9e-4 * 26 / 28)


def test_an_overridden_schedule_ends_with_the_run(drive: Drive) -> None:
    """Whatever batch the earlier iterations had."""
    common: dict[str, Any] = {"save": "out", "train_iters": 6, "min_lr": 1e-4, "lr_decay_style": "linear"}
    drive(argv(**common, global_batch_size=8, exit_interval=3))
    drive(argv(**common, global_batch_size=4, override_opt_param_scheduler=True))
    rates = {row["consumed samples"]: row["learning-rate"] for row in rows(Path("out")) if "learning-rate" in row}
    assert {samples: rates[samples] for samples in (28, 32, 36)} == pytest.approx(
        {samples: 1e-3 - 9e-4 * samples / 36 for samples in (28, 32, 36)}
    )


def test_a_resume_of_fewer_samples_than_consumed_is_refused(drive: Drive) -> None:
    drive(argv(save="out", train_iters=None, train_samples=8))
    drive(argv(save="out", train_iters=None, train_samples=8))
    with pytest.raises(UserError, match=r"--train-samples 6: checkpoint .* has consumed 8 samples; give at least"):
        drive(argv(save="out", train_iters=None, train_samples=6))


Watched = list[tuple[int, list[float]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """(iterations before, amaxes in effect of gradients) at the beginning of each step."""
    found: Watched = []
    step = loop.train_step

    def watching(trainer: Any, batches: Any, config: Any, iteration: int) -> Any:
        histories = [layer.histories["grad_output"] for layer in trainer.runtime.layers]
        found.append((iteration, [history.in_effect[slot].item() for history, slot in histories]))
        return step(trainer, batches, config, iteration)

    monkeypatch.setattr(loop, "train_step", watching)
    return found


# 2 2 | 8 8
STEEP = RAMP | {"recipe": "fp8_delayed", "global_batch_size": 8, "rampup_batch_size": [2, 6, 4], "train_samples": 20}


def constant(batch: int, samples: int) -> dict[str, Any]:
    return STEEP | {"global_batch_size": batch, "rampup_batch_size": None, "train_samples": samples}


@pytest.mark.parametrize(("per_token", "factor"), [(None, 0.25), (True, 1)], ids=["mean", "sum"])
def test_histories_of_gradients_follow_the_ramp(
    drive: Drive, recorded: Watched, per_token: bool | None, factor: float
) -> None:
    """A mean over four times as many tokens is a quarter, resumed or not; a sum is not."""
    common = {"calculate_per_token_loss": per_token, "lr_decay_samples": 20, "save_interval": 100}
    drive(argv(**constant(2, samples=8) | common, no_save=True))
    at_batch_2 = dict(recorded)
    assert min(at_batch_2[2]) > 0
    recorded.clear()
    drive(argv(**STEEP | common, save="whole"))
    whole = list(recorded)
    assert whole[1][1] == at_batch_2[1]
    assert whole[2][1] == [amax * factor for amax in at_batch_2[2]]
    # Gradients measured at the new batch confirm the factor: 2 is halfway, in logarithms, to the 4 of a wrong one.
    assert all(1 <= now / before < 2 for now, before in zip(whole[3][1], whole[2][1], strict=True))
    for stop in (1, 2, 3):  # inside of the first batch size, at the change, and after it
        recorded.clear()
        drive(argv(**STEEP | common, save=f"parts {stop}", exit_interval=stop))
        drive(argv(**STEEP | common, save=f"parts {stop}"))
        assert (losses(Path(f"parts {stop}")), recorded) == (losses(Path("whole")), whole)


@pytest.mark.parametrize(("batch", "factor"), [(2, 1), (8, 0.25)])
def test_a_ramp_left_in_the_middle_counts_from_its_batch_of_then(
    drive: Drive, recorded: Watched, capsys: pytest.CaptureFixture[str], batch: int, factor: float
) -> None:
    """The last batch of its ramp, 8, says nothing about a checkpoint within."""
    drive(argv(**STEEP, save="out", exit_interval=1))
    drive(argv(**STEEP, save="resumed", load="out", exit_interval=1))
    before = recorded[-1]
    drive(argv(**constant(batch, samples=20), save="left", load="out", exit_interval=1))
    assert before[0] == recorded[-1][0] == 1
    assert recorded[-1][1] == [amax * factor for amax in before[1]]
    assert ("amax histories of gradients times 0.25" in capsys.readouterr().out) is (factor != 1)
