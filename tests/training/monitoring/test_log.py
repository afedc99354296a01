"""What a run tells is what Megatron's tools expect."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_lowprec.errors import UserError
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.paths import keep_older_run, run_paths
from megatron_lowprec.training.monitoring.log import RunLog, StepRow, iteration_line
from tests.training.helpers import largest_file

ROW = StepRow(
    iteration=7,
    consumed_samples=56,
    loss=5.5,
    learning_rate=3e-4,
    batch_size=8,
    seconds=0.25,
    tflops_per_gpu=1.5,
    grad_norm=0.75,
    num_zeros=None,
    params_norm=None,
    skipped_iterations=1,
    nan_iterations=0,
)


def row(**changes: Any) -> StepRow:
    return StepRow(**{**ROW.__dict__, **changes})


def test_log_line_is_megatron_s() -> None:
    assert iteration_line(ROW, 100, loss=5.5, seconds=0.25, tflops=1.5) == (
        " iteration        7/     100 | consumed samples:           56 | elapsed time per iteration (ms): 250.0 |"
        " throughput per GPU (TFLOP/s/GPU): 1.5 | learning rate: 3.000000E-04 | global batch size:     8 |"
        " lm loss: 5.500000E+00 | loss scale: 1.0 | grad norm: 0.750 | number of skipped iterations:   1 |"
        " number of nan iterations:   0 |"
    )


def test_a_cpu_s_rate_is_not_zero() -> None:
    slow = row(tflops_per_gpu=0.01234)
    assert "(TFLOP/s/GPU): 0.012 |" in iteration_line(slow, 100, 5.5, 0.25, slow.tflops_per_gpu)
    assert (slow.metrics()["throughput"], row(tflops_per_gpu=812.46).metrics()["throughput"]) == (0.012, 812.5)


def test_log_line_puts_what_was_asked_for_in_megatron_s_order() -> None:
    line = iteration_line(row(num_zeros=12, params_norm=34.5), 100, 5.5, 0.25, 1.5)
    names = [part.split(":")[0].strip() for part in line.split("|") if ":" in part]
    order = ["loss scale", "grad norm", "num zeros", "params norm", "number of skipped iterations"]
    assert [name for name in names if name in order] == order


def test_metrics_hold_every_step_and_losses_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, paths = run_paths(Config(save=str(tmp_path / "run"), log_interval=2), "bf16")
    log = RunLog(config, paths, 3, writes=True, resumed_at=0, resolved={})
    for iteration, loss in ((1, 1.0), (2, math.nan), (3, 0.1)):
        log.step(row(iteration=iteration, loss=loss))
    log.evaluation(3, 24, "valid", 2.0, math.exp(2.0))
    log.close()
    rows = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert [r["iteration"] for r in rows] == [1, 2, 3, 3]
    assert float.fromhex(rows[2]["lm loss hex"]) == rows[2]["lm loss"] == 0.1
    assert {"learning-rate", "batch-size", "grad-norm", "iteration-time", "throughput"} <= rows[0].keys()
    assert rows[3]["lm loss validation"] == 2.0
    assert rows[3]["lm loss validation ppl"] == math.exp(2.0)
    printed = capsys.readouterr().out
    # Means are over the finite losses since the last line; the last iteration is always printed.
    assert re.findall(r"lm loss: ([^ ]+)", printed) == ["1.000000E+00", "1.000000E-01"]
    assert "validation loss at iteration 3 | lm loss value: 2.000000E+00" in printed
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    config, paths = run_paths(Config(save=str(tmp_path / "run")), "bf16")
    log = RunLog(config, paths, 3, writes=True, resumed_at=0, resolved={})
    log.step(row(iteration=1))
    with largest_file(paths.metrics.stat().st_size + 10), pytest.raises(UserError) as error:
        log.step(row(iteration=2))
    assert re.fullmatch(
        r".*/run: metrics could not be written: File too large; .*start the run again", str(error.value)
    )
    # What was written of the row is left out when the run goes on.
    RunLog(config, paths, 3, writes=True, resumed_at=1, resolved={})
    assert [json.loads(line)["iteration"] for line in paths.metrics.read_text().splitlines()] == [1]


def test_a_continued_run_drops_rows_that_it_writes_again(tmp_path: Path) -> None:
    config, paths = run_paths(Config(save=str(tmp_path)), "bf16")
    first = RunLog(config, paths, 4, writes=True, resumed_at=0, resolved={})
    for iteration in (1, 2, 3):
        first.step(row(iteration=iteration))
    first.close()
    with paths.metrics.open("a") as metrics:
        metrics.write('{"iteration": 4, "lm lo')
    second = RunLog(config, paths, 4, writes=True, resumed_at=2, resolved={})
    second.step(row(iteration=3, loss=9.0))
    second.close()
    rows = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert [(r["iteration"], r["lm loss"]) for r in rows] == [(1, 5.5), (2, 5.5), (3, 9.0)]
    third = RunLog(config, paths, 4, writes=True, resumed_at=0, resolved={})  # there was no checkpoint
    third.step(row(iteration=1, loss=8.0))
    third.close()
    board = EventAccumulator(str(paths.tensorboard), size_guidance={"scalars": 0})
    board.Reload()
    assert [(scalar.step, scalar.value) for scalar in board.Scalars("lm loss")] == [(1, 8.0)]
    assert len(paths.metrics.read_text().splitlines()) == 1


@pytest.mark.parametrize("options", [{"save": "kept"}, {"save": "runs/kept"}, {"load": "runs/gpt-bf16/checkpoints"}])
def test_metrics_stay_with_their_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("kept", "runs/kept", "runs/gpt-bf16/checkpoints"):
        (tmp_path / folder / "iter_0000002").mkdir(parents=True)
    run_paths(Config(**options), "bf16")
    config, paths = run_paths(Config(no_save=True), "bf16")
    assert keep_older_run(paths, config) == ["an older run's folder moved to runs/gpt-bf16.1"]
    paths.run.joinpath("checkpoints/iter_0000002").mkdir(parents=True)
    with pytest.raises(UserError, match="name another folder with --save"):
        run_paths(Config(no_save=True, **options), "bf16")


def test_a_new_run_leaves_an_older_one_s_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, paths = run_paths(Config(config="configs/models/gpt_tiny.yaml"), "bf16")
    assert paths.run == Path("runs/gpt_tiny-bf16")
    assert config.save == "runs/gpt_tiny-bf16/checkpoints"
    paths.run.mkdir(parents=True)
    paths.metrics.write_text("{}\n")
    assert keep_older_run(paths, Config(load="runs/gpt_tiny-bf16/checkpoints")) == [], "this run goes on"
    assert len(keep_older_run(paths, config)) == 1
    assert (tmp_path / "runs/gpt_tiny-bf16.1/metrics.jsonl").exists()
    assert not paths.run.exists()
