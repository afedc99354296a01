"""The table of gaps by model and budget: its cells, and the interval of a change."""

import math
import re
from pathlib import Path

import pytest

from megatron_lowprec.commands import report_page as report
from megatron_lowprec.report.ladder.gap_points import Line, Point
from megatron_lowprec.report.ladder.gap_table import gap_table
from tests.report.ladder.test_gap_figure import sweep


def line(label: str, *points: Point, parameters: float = 1e6) -> Line:
    return Line(label, f"{parameters / 1e6:g}M", parameters, points)


def test_rows_are_models_and_recipes_and_columns_are_tokens() -> None:
    short, long = Point(10.0, 0.02, 0.005, 2, 0.002, 8.0), Point(40.0, 0.05, 0.01, 2, 0.004, 6.0)
    wide = Point(5.0, -0.01)  # of one seed, so without an interval
    table = gap_table([line("mxfp4", wide, parameters=2e6), line("mxfp8", short, long)], "bf16", 0.95)
    assert table is not None
    assert [column.partition("\n")[0] for column in table.columns] == [
        "parameters",
        "recipe",
        *("gap to bf16, 10M tokens", "± of 10M", "gap to bf16, 40M tokens", "± of 40M"),
        *("change", "± of change"),
    ]
    # Welch: 2e-5**2 / ((4e-6)**2 / 8 + (16e-6)**2 / 6) = 8.955 degrees of freedom, t 2.2637, times sqrt(2e-5)
    assert table.rows[0][1:] == ("mxfp8", "+0.0200", "0.0050", "+0.0500", "0.0100", "+0.0300", "0.0101")
    assert table.rows[1][1:] == ("mxfp4", "−0.0100", "–", "–", "–", "–", "–")


def test_a_change_is_as_uncertain_as_its_gaps() -> None:
    known, unknown = Point(10.0, 0.02, 0.005, 2, 0.002, 8.0), Point(40.0, 0.05)
    table = gap_table([line("mxfp8", known, unknown)], "bf16", 0.95)
    assert table is not None
    assert table.rows[0][-2:] == ("+0.0300", "–")
    prior = [Point(tokens, 0.02, 0.005, 2, 0.003, math.inf) for tokens in (10.0, 40.0)]
    table = gap_table([line("mxfp8", *prior)], "bf16", 0.95)
    assert table is not None
    assert table.rows[0][-2:] == ("0.0000", f"{1.95996 * 0.003 * math.sqrt(2):.4f}")


def test_budgets_that_round_alike_have_distinct_labels() -> None:
    lines = [line("mxfp8", Point(72.08, 0.01), Point(90.0, 0.02)), line("mxfp4", Point(72.12, 0.03))]
    table = gap_table(lines, "bf16", 0.95)
    assert table is not None
    assert [column.removesuffix("\nnats") for column in table.columns[2:7:2]] == [
        f"gap to bf16, {tokens} tokens" for tokens in ("72,080,000", "72,120,000", "90,000,000")
    ]
    assert [row[2:7:2] for row in table.rows] == [("+0.0100", "–", "+0.0200"), ("–", "+0.0300", "–")]


def test_one_budget_has_no_table() -> None:
    assert gap_table([line("mxfp8", Point(10.0, 0.02)), line("mxfp4", Point(10.0, 0.02))], "bf16", 0.95) is None
    assert gap_table([], "bf16", 0.95) is None


def test_the_report_prints_and_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [sweep(tmp_path / "short", 0.05), sweep(tmp_path / "long", 0.08, train_iters=800)]
    assert report.main([*map(str, folders), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    (row,) = re.findall(r"25\.2M +mxfp4_rht +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)\n", printed)
    assert [float(cell) for cell in row[::2]] == [0.0533, 0.0833, 0.03]
    assert "±: half width of the 95% interval" in printed
    assert row[-1] in (tmp_path / "out/report.html").read_text()
