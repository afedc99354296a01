"""The picture of a run's operands holds the rows' numbers, and the summary names the worst."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_lowprec.report import operand_plots
from tests.report.synthetic import operand_row as row
from tests.report.synthetic import write_snapshots
from tools import plot_quantization


def test_numbers_go_to_their_places_and_of_experts_the_worst() -> None:
    rows = [
        row(10, "layers.1.a", 12.0),
        row(20, "layers.1.a", 9.0),
        row(20, "layers.2.e of expert 0", 8.0),
        row(20, "layers.2.e of expert 1", 5.0),
        row(20, "layers.1.a", 30.0, "wgrad", "input"),
        row(10, "layers.2.e of expert 0", None),
    ]
    found = operand_plots.table(rows, ("dgrad", "grad_output"), "snr", ["layers.1.a", "layers.2.e"], [10, 20])
    np.testing.assert_array_equal(found, [[12.0, 9.0], [math.nan, 5.0]])
    amax = operand_plots.table(rows, ("dgrad", "grad_output"), "amax", ["layers.1.a", "layers.2.e"], [10, 20])
    assert amax[0, 0] == 2.0


def test_the_worst_bias_is_the_largest_and_what_is_not_finite_is_no_number() -> None:
    linears, kind = ["layers.2.e"], ("dgrad", "grad_output")
    rows = [row(1, f"layers.2.e of expert {n}", 9.0) | {"bias": bias} for n, bias in enumerate((-1e-3, 0.3, -0.2))]
    assert operand_plots.table(rows, kind, "bias", linears, [1]).item() == 0.3
    rows[1] |= {"amax": None, "snr": None}
    assert math.isnan(operand_plots.table(rows, kind, "snr", linears, [1]).item())
    said = plot_quantization.summary(rows, "snr")
    assert said[0] == "not finite: 1 of 3 operands, first layers.2.e of expert 1 dgrad grad_output"


@pytest.mark.parametrize("what", plot_quantization.QUANTITIES)
def test_a_run_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    kind = ("wgrad", "output") if what == plot_quantization.OF_OUTPUTS else ("dgrad", "grad_output")
    rows = [
        row(i, f"layers.{n}.a", 10.0 + n - i / 10, *kind, gradient_to_noise=float(n))
        for i in (10, 20)
        for n in range(1, 8)
    ]
    run = write_snapshots(tmp_path / "run", rows)
    output = tmp_path / "x.png"
    assert plot_quantization.main([str(run), "--what", what, "--output", str(output)]) == 0
    assert output.read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"iteration 20, 7 operands; the worst by {plot_quantization.QUANTITIES[what].title}:"
    texts = ["SNR 9.0 dB", "bias +1.00e-03", "underflow 25.00%"]
    own = {"gradient_to_noise": "gradient to noise 1.00", "amax": "log2 of amax 2.0"}
    first = own.get(what) or next((text for text in texts if text.lower().startswith(what)), "saturation ")
    assert printed[1].startswith(f"  layers.1.a {' '.join(kind)}, e2m1: {first}")
    assert all(text in printed[1] for text in texts)
    assert len(printed) == 1 + 5 + 1


def test_operands_are_ranked_by_the_quantity_and_each_has_its_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(1, f"layers.{n}.a", 10.0 + n) | {"underflow": n / 10} for n in range(8)]
    run = write_snapshots(tmp_path / "run", rows)
    for what, worst, figure in (("snr", 0, "quantization.png"), ("underflow", 7, "quantization-underflow.png")):
        assert plot_quantization.main([str(run), "--what", what]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert f"layers.{worst}.a" in printed[1]
        assert printed[-1] == f"wrote {run / figure}"
        assert (run / figure).exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist: train with --log-quantization-interval N"),
        ("", "has no rows"),
        ('{"iteration": 1}\n', "has no rows"),
    ],
)
def test_unusable_files_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "quantization.jsonl").write_text(content)
    assert plot_quantization.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
