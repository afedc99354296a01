"""tools/run_logs.py: steps and peaks from the logs of this driver and of Megatron-LM."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lowprec.training.monitoring.log import StepRow, iteration_line
from tools.run_logs import main

ROW = StepRow(0, 0, 12.58, 1.5e-4, 32, 0.0, 0.0, 7.63, None, None, 0, 0)


def log(folder: Path, name: str, ms: tuple[float, ...], *memory: str, grad_norm: float = 7.63) -> None:
    folder.mkdir(exist_ok=True)
    rows = [replace(ROW, iteration=at, consumed_samples=32 * at, grad_norm=grad_norm) for at in range(1, len(ms) + 1)]
    lines = [iteration_line(row, 3, 12.58, each / 1e3, 1e5 / each) for row, each in zip(rows, ms, strict=True)]
    (folder / f"{name}.log").write_text("\n".join([*lines, *memory]))


def written(folder: Path, out: Path, *flags: str) -> dict[str, dict[str, object]]:
    assert (
        main([str(folder), "--sequence", "8192", "--gpus", "2", "--baseline", "bf16", "--out", str(out), *flags]) == 0
    )
    return {row["variant"]: row for row in json.loads(out.read_text())["tables"][0]["rows"]}


def test_rows_of_both_programs(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    log(
        folder,
        "bf16",
        (900.0, 210.0, 200.0),
        "memory: 60.5 GiB planned of 80.0 on a GPU",
        "memory: 64.0 GiB allocated at most",
    )
    log(folder, "Stock tensorwise", (800.0, 150.0, 170.0), "max allocated: 1024.00 | x", "max allocated: 32768.00 | x")
    (folder / "bf16").mkdir()
    (folder / "bf16/run.json").write_text('{"recipe": "bf16"}')
    (folder / "bf16/metrics.jsonl").write_text('{"grad-norm": 7.5}\n{"grad-norm": 7.25}\n')
    rows = written(folder, tmp_path / "out.json")
    assert list(rows) == ["bf16", "Stock tensorwise"]
    stock, bf16 = rows["Stock tensorwise"], rows["bf16"]
    assert (stock["ms"], stock["low"], stock["high"]) == (160.0, 150.0, 170.0)
    assert stock["over_bf16"] == pytest.approx(160 / 205)
    assert stock["tokens_s"] == pytest.approx(32 * 8192 / 2 / 0.160)
    assert stock["tflops"] == pytest.approx((666.7 + 588.2) / 2)
    assert (stock["peak_gib"], stock["planned_gib"], stock["peak_over_bf16"]) == (32.0, None, 0.5)
    assert (bf16["peak_gib"], bf16["planned_gib"]) == (64.0, 60.5)
    assert json.loads((tmp_path / "out.json").read_text())["runs"] == {
        "bf16": {"run": {"recipe": "bf16"}, "metrics": [{"grad-norm": 7.5}, {"grad-norm": 7.25}]}
    }
    assert written(folder, tmp_path / "out.json", "--first", "3")["bf16"]["ms"] == 200.0


@pytest.mark.parametrize("consumed", [32 * 2, 32 * 2 + 1000])
def test_tokens_are_those_of_each_iteration(tmp_path: Path, consumed: int) -> None:
    """A batch of 16, then 32, at one rate; a resumed run's samples so far say nothing about its batch."""
    (tmp_path / "logs").mkdir()
    lines = []
    for iteration, batch in enumerate((16, 16, 16, 32, 32), 3):
        consumed += batch
        row = replace(ROW, iteration=iteration, consumed_samples=consumed, batch_size=batch)
        lines.append(iteration_line(row, 7, 12.58, batch / 100, 1.0))
    (tmp_path / "logs/bf16.log").write_text("\n".join(lines))
    row = written(tmp_path / "logs", tmp_path / "out.json")["bf16"]
    assert row["ms"] == 160.0
    assert row["tokens_s"] == pytest.approx(100 * 8192 / 2)


def test_a_run_that_failed_has_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path / "logs", "bf16", (900.0, 210.0, 200.0))
    (tmp_path / "logs/fp8.log").write_text("pretrain_gpt.py: error: no such package\n")
    assert list(written(tmp_path / "logs", tmp_path / "out.json")) == ["bf16"]
    assert "fp8.log: left out, 0 iterations" in capsys.readouterr().err


def test_a_norm_that_is_not_finite_is_an_iteration(tmp_path: Path) -> None:
    log(tmp_path / "logs", "bf16", (900.0, 210.0, 200.0), grad_norm=math.nan)
    assert written(tmp_path / "logs", tmp_path / "out.json")["bf16"]["ms"] == 205.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--baseline", "bf17"], "--baseline bf17: {} has iterations of bf16"),
        (["--first", "4"], "--baseline bf16: {} has iterations of no run"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    log(tmp_path / "logs", "bf16", (900.0, 210.0, 200.0))
    required = ["--sequence", "8192", "--gpus", "2", "--baseline", "bf16", "--out", str(tmp_path / "out.json")]
    assert main([str(tmp_path / "logs"), *required, *flags]) == 2
    assert message.format(tmp_path / "logs") in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
